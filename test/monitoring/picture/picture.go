// Package picture draws a Grafana dashboard as SVG from the answers to its own queries: titles,
// lines and legends, as far as a document needs them.
package picture

import (
	"fmt"
	"html"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/crust-csi/crust-csi/deploy/monitoring"
)

// Line is one time series.
type Line struct {
	Labels map[string]string
	Points []Point
}

// Point is a value at a time, in seconds since the beginning.
type Point struct{ At, Value float64 }

// Query evaluates an expression.
type Query func(expr string) []Line

const (
	column, rowHeight = 52.0, 27.0 // of Grafana's grid
	gap               = 6.0
	glyph             = 6.2 // approximate width of a letter
)

var colours = []string{"#3274d9", "#e0752d", "#299c46", "#a352cc", "#e02f44", "#0aa3a3", "#b8860b", "#6b7280", "#c2185b", "#5d4037"}

// Draw returns the picture of a dashboard over so many seconds.
func Draw(d monitoring.Dashboard, seconds float64, query Query) string {
	var b strings.Builder
	bottom := 0
	for _, p := range d.Panels {
		bottom = max(bottom, p.GridPos.Y+p.GridPos.H)
	}
	width, height := 24*column+gap, float64(bottom)*rowHeight+gap
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="10.5">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%g" height="%g" fill="#f4f5f5"/>`+"\n", width, height)
	for _, p := range d.Panels {
		x, y := float64(p.GridPos.X)*column+gap, float64(p.GridPos.Y)*rowHeight+gap
		w, h := float64(p.GridPos.W)*column-gap, float64(p.GridPos.H)*rowHeight-gap
		if p.Type == "row" {
			text(&b, x+4, y+15, `font-size="13" font-weight="bold" fill="#24292e"`, p.Title)
			continue
		}
		fmt.Fprintf(&b, `<rect x="%g" y="%g" width="%g" height="%g" fill="white" stroke="#d8d9da" rx="2"/>`+"\n", x, y, w, h)
		text(&b, x+8, y+16, `font-size="12" fill="#24292e"`, p.Title)
		if p.Type == "stat" {
			stat(&b, p, x, y, w, h, query)
			continue
		}
		chart(&b, p, box{x + 8, y + 26, w - 16, h - 34}, seconds, query)
	}
	return b.String() + "</svg>\n"
}

func text(b *strings.Builder, x, y float64, style, s string) {
	fmt.Fprintf(b, `<text x="%.1f" y="%.1f" %s>%s</text>`+"\n", x, y, style, html.EscapeString(s))
}

func stat(b *strings.Builder, p monitoring.Panel, x, y, w, h float64, query Query) {
	value := math.NaN()
	for _, l := range query(p.Targets[0].Expr) {
		if n := len(l.Points); n > 0 {
			value = l.Points[n-1].Value
		}
	}
	colour := "#299c46"
	for _, s := range p.FieldConfig.Defaults.Thresholds.Steps {
		if s.Value != nil && value >= *s.Value {
			colour = map[string]string{"red": "#e02f44", "orange": "#e0752d"}[s.Color]
		}
	}
	text(b, x+w/2, y+h/2+24, `font-size="38" text-anchor="middle" fill="`+colour+`"`, number(value, p.FieldConfig.Defaults.Unit))
}

type box struct{ x, y, w, h float64 }

type named struct {
	Line
	name string
}

func chart(b *strings.Builder, p monitoring.Panel, at box, seconds float64, query Query) {
	var lines []named
	for _, t := range p.Targets {
		for _, l := range query(t.Expr) {
			lines = append(lines, named{l, legend(t.LegendFormat, l.Labels)})
		}
	}
	slices.SortStableFunc(lines, func(a, b named) int { return strings.Compare(a.name, b.name) })
	unit := p.FieldConfig.Defaults.Unit
	step, top := scale(lines, unit, p.FieldConfig.Defaults.Max)
	widest := 0
	for v := 0.0; v <= top*1.001; v += step {
		widest = max(widest, len(number(v, unit)))
	}
	rows := key(b, lines, box{at.x, at.y + at.h, at.w, 0})
	plot := box{at.x + float64(widest)*glyph + 6, at.y + 4, 0, at.h - 22 - float64(rows)*14}
	plot.w = at.x + at.w - plot.x - 4
	for v := 0.0; v <= top*1.001; v += step {
		y := plot.y + plot.h*(1-v/top)
		fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#e4e7e7"/>`+"\n", plot.x, y, plot.x+plot.w, y)
		text(b, plot.x-5, y+3.5, `text-anchor="end" fill="#6b7280"`, number(v, unit))
	}
	for s := 0.0; s <= seconds; s += 10 {
		x := plot.x + plot.w*s/seconds
		fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#eef0f0"/>`+"\n", x, plot.y, x, plot.y+plot.h)
		text(b, x, plot.y+plot.h+12, `text-anchor="middle" fill="#6b7280"`, fmt.Sprintf("%g s", s))
	}
	for i, l := range lines {
		line(b, l.Points, plot, seconds, top, colours[i%len(colours)])
	}
	if len(lines) == 0 {
		text(b, plot.x+plot.w/2, plot.y+plot.h/2, `text-anchor="middle" fill="#6b7280"`, "no data")
	}
}

// line draws points, with a gap for missing ones.
func line(b *strings.Builder, points []Point, plot box, seconds, top float64, colour string) {
	var piece []string
	flush := func() {
		switch len(piece) {
		case 0:
		case 1:
			x, y, _ := strings.Cut(piece[0], ",")
			fmt.Fprintf(b, `<circle cx="%s" cy="%s" r="1.8" fill="%s"/>`+"\n", x, y, colour)
		default:
			fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.6"/>`+"\n", strings.Join(piece, " "), colour)
		}
		piece = nil
	}
	last := math.Inf(-1)
	for _, p := range points {
		if math.IsNaN(p.Value) || p.At < 0 {
			flush()
			continue
		}
		if p.At-last > 1.5 {
			flush()
		}
		last = p.At
		piece = append(piece, fmt.Sprintf("%.1f,%.1f", plot.x+plot.w*p.At/seconds, plot.y+plot.h*(1-min(p.Value/top, 1))))
	}
	flush()
}

// key draws the legend upwards from the bottom of a box, in at most three rows, and returns how
// many.
func key(b *strings.Builder, lines []named, foot box) (rows int) {
	const most = 3
	type entry struct {
		x      float64
		row    int
		colour string
		name   string
	}
	var entries []entry
	x, row := 0.0, 0
	for i, l := range lines {
		name := l.name
		if len(name) > 34 {
			name = name[:16] + "…" + name[len(name)-16:]
		}
		w := 16 + float64(len(name))*glyph + 10
		if x > 0 && x+w > foot.w {
			x, row = 0, row+1
		}
		if row == most {
			entries[len(entries)-1].name, entries[len(entries)-1].colour = fmt.Sprintf("and %d more", len(lines)-i+1), "none"
			row--
			break
		}
		entries = append(entries, entry{x, row, colours[i%len(colours)], name})
		x += w
	}
	for _, e := range entries {
		y := foot.y - float64(row-e.row)*14
		fmt.Fprintf(b, `<rect x="%.1f" y="%.1f" width="10" height="3" fill="%s"/>`+"\n", foot.x+e.x, y-4, e.colour)
		text(b, foot.x+e.x+14, y, `fill="#464c54"`, e.name)
	}
	return row + 1
}

var placeholder = regexp.MustCompile(`\{\{\s*([a-z_]+)\s*\}\}`)

func legend(format string, labels map[string]string) string {
	return placeholder.ReplaceAllStringFunc(format, func(m string) string { return labels[placeholder.FindStringSubmatch(m)[1]] })
}

// scale returns the distance of the grid lines and the topmost value.
func scale(lines []named, unit string, limit *float64) (step, top float64) {
	high := 0.0
	for _, l := range lines {
		for _, p := range l.Points {
			if !math.IsNaN(p.Value) && !math.IsInf(p.Value, 0) {
				high = max(high, p.Value)
			}
		}
	}
	switch {
	case limit != nil:
		return *limit / 4, *limit
	case high == 0:
		return 0.5, 1
	}
	base := 10.0
	if unit == "bytes" {
		base = 2
	}
	step = math.Pow(base, math.Floor(math.Log(high/4)/math.Log(base)))
	for _, m := range []float64{1, 2, 2.5, 5, 10} {
		if base == 2 && m == 2.5 {
			continue
		}
		if high <= step*m*4 {
			step *= m
			break
		}
	}
	if unit == "none" {
		step = max(math.Ceil(step), 1)
	}
	return step, math.Ceil(high/step) * step
}

// number formats a value in its unit.
func number(v float64, unit string) string {
	short := func(v float64) string {
		return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.3f", v), "0"), ".")
	}
	switch {
	case math.IsNaN(v):
		return "–"
	case unit == "percentunit":
		return short(v*100) + " %"
	case unit == "bytes":
		for _, u := range []string{"B", "KiB", "MiB", "GiB"} {
			if v < 1024 {
				return fmt.Sprintf("%.4g %s", v, u)
			}
			v /= 1024
		}
		return fmt.Sprintf("%.4g TiB", v)
	case unit == "s" && v > 0 && v < 1:
		return short(v*1000) + " ms"
	case unit == "s":
		return short(v) + " s"
	case unit == "ops":
		return short(v) + "/s"
	}
	return short(v)
}
