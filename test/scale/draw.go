package main

import (
	"fmt"
	"io"
	"math"
	"strings"
)

type point struct{ x, y float64 }

type curve struct {
	name   string
	points []point
}

func (c *curve) add(x int, y float64) { c.points = append(c.points, point{float64(x), y}) }

// table writes the numbers as Markdown.
func table(w io.Writer, x string, curves []curve) {
	fmt.Fprint(w, "\n| "+x+" |")
	for _, p := range curves[0].points {
		fmt.Fprintf(w, " %g |", p.x)
	}
	fmt.Fprint(w, "\n|---"+strings.Repeat("|---", len(curves[0].points))+"|\n")
	for _, c := range curves {
		fmt.Fprint(w, "| "+c.name+" |")
		for _, p := range c.points {
			fmt.Fprintf(w, " %.3g |", p.y)
		}
		fmt.Fprintln(w)
	}
}

// draw returns an SVG picture with logarithmic axes: a rising straight line is growth, a flat one
// is none.
func draw(x string, curves []curve) string {
	const width, height, left, bottom, right, top = 640.0, 360.0, 60.0, 50.0, 20.0, 20.0
	colours := []string{"#1f77b4", "#d62728", "#2ca02c", "#9467bd"}
	lowX, highX, lowY, highY := math.Inf(1), 0.0, math.Inf(1), 0.0
	for _, c := range curves {
		for _, p := range c.points {
			lowX, highX = min(lowX, p.x), max(highX, p.x)
			lowY, highY = min(lowY, p.y), max(highY, p.y)
		}
	}
	fromX, toX := math.Floor(math.Log10(lowX)), math.Log10(highX)
	fromY, toY := math.Floor(math.Log10(max(lowY, 1e-3))), math.Ceil(math.Log10(highY))
	atX := func(v float64) float64 { return left + (math.Log10(v)-fromX)/max(toX-fromX, 1)*(width-left-right) }
	atY := func(v float64) float64 {
		return height - bottom - (math.Log10(max(v, 1e-3))-fromY)/max(toY-fromY, 1)*(height-bottom-top)
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" font-family="sans-serif" font-size="12">`+"\n", width,
		height+20*float64(len(curves)))
	b.WriteString(`<rect width="100%" height="100%" fill="white"/>` + "\n")
	for e := fromY; e <= toY; e++ {
		y := atY(math.Pow(10, e))
		fmt.Fprintf(&b, `<line x1="%g" y1="%.1f" x2="%g" y2="%.1f" stroke="#ddd"/><text x="%g" y="%.1f" text-anchor="end">%g</text>`+"\n",
			left, y, width-right, y, left-6, y+4, math.Pow(10, e))
	}
	for e := fromX; e <= toX+0.01; e++ {
		at := atX(math.Pow(10, e))
		fmt.Fprintf(&b, `<line x1="%.1f" y1="%g" x2="%.1f" y2="%g" stroke="#ddd"/><text x="%.1f" y="%g" text-anchor="middle">%.0f</text>`+
			"\n",
			at, top, at, height-bottom, at, height-bottom+16, math.Pow(10, e))
	}
	fmt.Fprintf(&b, `<text x="%g" y="%g" text-anchor="middle">%s</text>`+"\n", (left+width-right)/2, height-bottom+34, x)
	for i, c := range curves {
		colour := colours[i%len(colours)]
		var line []string
		for _, p := range c.points {
			line = append(line, fmt.Sprintf("%.1f,%.1f", atX(p.x), atY(p.y)))
			fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", atX(p.x), atY(p.y), colour)
		}
		y := height + 20*float64(i) + 4
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.Join(line, " "), colour)
		fmt.Fprintf(&b, `<rect x="%g" y="%g" width="12" height="12" fill="%s"/><text x="%g" y="%g">%s</text>`+"\n", left, y-10, colour,
			left+18, y, c.name)
	}
	return b.String() + "</svg>\n"
}
