package rpcserver

import (
	"io"
	"log/slog"
)

// Logger writes to w as text or json; verbosity is the value of the commands' -v.
func Logger(w io.Writer, format string, verbosity int) *slog.Logger {
	return LoggerAt(w, format, LevelOf(verbosity))
}

// LoggerAt is a Logger whose level may change.
func LoggerAt(w io.Writer, format string, level slog.Leveler) *slog.Logger {
	h := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, h))
	}
	return slog.New(slog.NewTextHandler(w, h))
}

// LevelOf returns the log level for -v.
func LevelOf(verbosity int) slog.Level {
	switch {
	case verbosity >= 5:
		return LevelRequests
	case verbosity >= 4:
		return slog.LevelDebug
	case verbosity >= 1:
		return slog.LevelInfo
	}
	return slog.LevelError
}
