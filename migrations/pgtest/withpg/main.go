// Command withpg runs a command beside a private Postgres server that is gone when the command ends:
//
//	go run ./migrations/pgtest/withpg -- go test ./...
//
// It sets CONVERGER_TEST_DATABASE_URL, which package pgtest obeys, so all test binaries of a run share one server. If the
// variable is set already, it only runs the command. Its exit status is the command's (`go run` turns any failure into 1).
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"converger/migrations/pgtest"
)

func main() {
	code, err := run(context.Background(), os.Args[1:], os.Getenv, os.Stdin, os.Stdout, os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "withpg:", err)
	}
	os.Exit(code)
}

// run gives the exit status, 2 for a wrong call and 1 for a failure of its own.
func run(ctx context.Context, args []string, getenv func(string) string, stdin io.Reader, stdout, stderr io.Writer) (code int, fault error) {
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		return 2, errors.New("usage: withpg -- COMMAND [ARGUMENT...]")
	}
	// A terminal's Ctrl-C reaches the command as well; it ends by itself, and then so do we.
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)

	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, stderr
	if getenv(pgtest.EnvURL) == "" {
		url, stop, err := pgtest.StartServer(ctx)
		if err != nil {
			return 1, err
		}
		defer func() {
			if e := stop(); e != nil {
				code, fault = max(code, 1), errors.Join(fault, e)
			}
		}()
		cmd.Env = append(os.Environ(), pgtest.EnvURL+"="+url)
	}
	if err := cmd.Start(); err != nil {
		return 1, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			if s == syscall.SIGTERM { // sent to us alone
				_ = cmd.Process.Signal(s) // it may have ended already
			}
		case err := <-ended:
			var exit *exec.ExitError
			switch {
			case errors.As(err, &exit) && exit.ExitCode() >= 0:
				return exit.ExitCode(), nil
			case err != nil:
				return 1, err
			}
			return 0, nil
		}
	}
}
