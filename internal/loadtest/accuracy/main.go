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
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"time"

	"converger/internal/devpg"
	"converger/migrations"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
	default:
		fmt.Fprintln(os.Stderr, "accuracy:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	flags := flag.NewFlagSet("accuracy", flag.ContinueOnError)
	flags.SetOutput(stderr)
	b := &bench{progress: stderr}
	only := flags.String("only", "", "measure the rows alone whose name and number of nodes have this in them, such as \"cold\" or \"20 nodes\"; several with |")
	write := flags.String("write", "", "write the table into this page, between its marks")
	note := flags.String("note", "", "what else is to be known of the machine, such as \"with real-time priority beside other programs\"")
	flags.StringVar(&b.program, "program", "bin/server", "the hub, for the rows over HTTP")
	profile := flags.String("profile", "", "write a profile of the processor's time here (go tool pprof)")
	flags.IntVar(&b.tries, "tries", 3, "how often a row is measured at most while the machine is too busy to judge it")
	if err := flags.Parse(args); err != nil {
		return err
	}
	var rows []row
	for _, r := range table() {
		if slices.ContainsFunc(strings.Split(*only, "|"), func(part string) bool { return strings.Contains(r.key(), part) }) {
			rows = append(rows, r)
		}
	}
	switch {
	case flags.NArg() > 0:
		return fmt.Errorf("unexpected %q", flags.Arg(0))
	case b.tries < 1:
		return errors.New("--tries must be above 0")
	case len(rows) == 0:
		return fmt.Errorf("--only: no row has %q in its name", *only)
	case *only != "" && *write != "":
		return errors.New("--only and --write: a page has the whole table")
	}
	if b.program, err = filepath.Abs(b.program); err != nil {
		return err
	}
	if _, err := os.Stat(b.program); err != nil {
		return fmt.Errorf("%w; make build makes it", err)
	}
	if b.dir, err = os.MkdirTemp("", "accuracy-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dir)) }()
	pg, err := devpg.Start(ctx, devpg.Config{Dir: filepath.Join(b.dir, "pg"), BinDir: os.Getenv("PG_BIN"), VendoredDir: filepath.Join(".cache", "pg")})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.Stop(context.WithoutCancel(ctx))) }()
	b.database = pg.URL()
	if _, err := migrations.Up(ctx, b.database); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.rest()) }()

	if *profile != "" {
		f, err := os.Create(*profile)
		if err != nil {
			return err
		}
		if err := pprof.StartCPUProfile(f); err != nil {
			return errors.Join(err, f.Close())
		}
		defer func() {
			pprof.StopCPUProfile()
			err = errors.Join(err, f.Close())
		}()
	}
	debug.SetGCPercent(400) // the collector would take time from what is measured
	left := time.Duration(0)
	for _, r := range rows {
		left += time.Duration(r.count()+2) * time.Second
	}
	fmt.Fprintf(stderr, "%d rows, about %s, longer if the machine is busy.\n", len(rows), left.Round(time.Minute))
	var all []result
	failed := error(nil)
	for _, r := range rows {
		results, err := b.measure(ctx, r)
		if err != nil {
			failed = err
			break
		}
		all = append(all, results...)
	}
	machine := thisMachine()
	if *note != "" {
		machine += ", " + *note
	}
	text := markdown(all, machine, time.Now())
	if _, err := io.WriteString(stdout, text); err != nil {
		return err
	}
	for _, r := range all {
		if len(r.broken) > 0 {
			failed = errors.Join(failed, fmt.Errorf("%s, %d/s: %s", r.key(), r.rule.Limit, strings.Join(r.broken, "; ")))
		}
	}
	if failed == nil && *write != "" {
		return embedIn(*write, text)
	}
	return failed
}
