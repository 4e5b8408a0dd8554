package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
	default:
		fmt.Fprintln(os.Stderr, "pathbench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	b := &bench{progress: stderr}
	flags := flag.NewFlagSet("pathbench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&b.o.program, "program", "bin/server", "the hub")
	flags.IntVar(&b.o.rounds, "rounds", 3, "rounds; the table has their medians")
	flags.Float64Var(&b.o.seconds, "seconds", 3, "seconds of each measurement")
	flags.IntVar(&b.o.queued, "queued", 20_000, "deliveries queued to the slow endpoint of the row neighbour")
	only := flags.String("only", "", "measure these rows alone, separated by commas: "+strings.Join(rowNames, ", "))
	jsonPath := flags.String("json", "", "write the results to this file as well")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *only != "" {
		b.o.only = strings.Split(*only, ",")
	}
	switch {
	case flags.NArg() > 0:
		return fmt.Errorf("unexpected %q", flags.Arg(0))
	case b.o.rounds < 1 || b.o.seconds <= 0 || b.o.queued < 1:
		return errors.New("--rounds, --seconds and --queued must be above 0")
	}
	for _, r := range b.o.only {
		if !slices.Contains(rowNames, r) {
			return fmt.Errorf("--only: there is no row %q; the rows are %s", r, strings.Join(rowNames, ", "))
		}
	}
	if b.o.program, err = filepath.Abs(b.o.program); err != nil {
		return err
	}
	if _, err := os.Stat(b.o.program); err != nil {
		return fmt.Errorf("%w; make build makes it", err)
	}
	dir, err := os.MkdirTemp("", "pathbench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	debug.SetGCPercent(400) // the driver's collector would take time from what it measures
	err = b.run(ctx, dir, os.Getenv("PG_BIN"), filepath.Join(".cache", "pg"))
	if len(b.results) > 0 {
		err = errors.Join(err, writeTable(stdout, b.machine, b.results))
	}
	if *jsonPath != "" && err == nil {
		f, ferr := os.Create(*jsonPath)
		if ferr != nil {
			return ferr
		}
		err = errors.Join(writeJSON(f, b.machine, b.results), f.Close())
	}
	return err
}
