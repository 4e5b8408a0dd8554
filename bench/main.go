package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"converger/internal/loadtest/report"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// bench is a run.
type bench struct {
	rounds   int
	slice    time.Duration // of one contestant in one round
	program  string
	load     string // a part of the name of the loads to run, of checks
	progress io.Writer
	began    time.Time
	rows     []row
}

var parts = []struct {
	name string
	run  func(*bench, context.Context) error
}{
	{"memory", (*bench).memory}, // first: other parts leave things in the heap
	{"checks", (*bench).checks},
	{"sync", (*bench).sync},
	{"owner", (*bench).owner},
	{"http", (*bench).http},
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 1 && args[0] == bareCommand {
		return serveBare(os.Stdin, stdout)
	}
	b := &bench{progress: stderr, began: time.Now()}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&b.rounds, "rounds", 15, "rounds in which the contestants take turns")
	flags.DurationVar(&b.slice, "slice", 30*time.Millisecond, "time of one contestant's checks in a round")
	flags.StringVar(&b.program, "program", "../bin/server", "the hub, for http")
	flags.StringVar(&b.load, "load", "", "of checks, run the loads alone whose name contains this: 'one hot key, 2'")
	only := flags.String("only", "", "run these parts alone, separated by commas: memory, checks, sync, owner, http")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 || b.rounds < 1 || b.slice <= 0 {
		return errors.New("usage: bench [--rounds N] [--slice D] [--only part,…] [--load TEXT] [--program FILE]")
	}
	var chosen []string
	if *only != "" {
		chosen = strings.Split(*only, ",")
	}
	var failed error
	for _, p := range parts {
		if len(chosen) > 0 && !slices.Contains(chosen, p.name) {
			continue
		}
		if err := p.run(b, ctx); err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", p.name, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	writeTable(stdout, b.rows)
	fmt.Fprintf(stdout, "\n%s; %d rounds; %.0f s\n", report.ThisMachine(), b.rounds, time.Since(b.began).Seconds())
	return failed
}

func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(b.progress, "[%5.1f s] %s\n", time.Since(b.began).Seconds(), fmt.Sprintf(format, args...))
}

func (b *bench) add(r row) {
	b.rows = append(b.rows, r)
	b.say("%s: %s, %s", r.work, r.measured, r.verdict)
}

// background starts loops; stop ends them and waits for them.
func background(ctx context.Context, loops ...func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{}, len(loops))
	for _, l := range loops {
		go func() {
			l(ctx)
			done <- struct{}{}
		}()
	}
	return func() {
		cancel()
		for range loops {
			<-done
		}
	}
}
