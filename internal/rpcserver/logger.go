package rpcserver

import (
	"io"
	"log/slog"
)

// Logger writes to w as text or json; verbosity is that of the commands' -v.
func Logger(w io.Writer, format string, verbosity int) *slog.Logger {
	level := slog.LevelError
	switch {
	case verbosity >= 5:
		level = LevelRequests
	case verbosity >= 4:
		level = slog.LevelDebug
	case verbosity >= 1:
		level = slog.LevelInfo
	}
	h := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, h))
	}
	return slog.New(slog.NewTextHandler(w, h))
}
