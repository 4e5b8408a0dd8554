package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// version is set by the linker.
var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the first signal asks to stop, the second one ends the program
	err := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	switch {
	case err == nil, errors.Is(err, context.Canceled):
	case errors.Is(err, errUsage):
		os.Exit(exitUsage)
	default:
		fmt.Fprintln(os.Stderr, "server:", err)
		os.Exit(exitCode(err))
	}
}

// exitCode is 1 unless the error knows better.
func exitCode(err error) int {
	if coded := interface{ ExitCode() int }(nil); errors.As(err, &coded) {
		return coded.ExitCode()
	}
	return 1
}
