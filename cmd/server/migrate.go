package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"converger/migrations"
)

type migrateCmd struct {
	Up     migrateUpCmd     `cmd:"" help:"Apply what is missing. Safe to run on several nodes at once, and again."`
	Status migrateStatusCmd `cmd:"" help:"Show what is applied and what is missing. Changes nothing; fails when something is missing."`
}

type migrateUpCmd struct {
	databaseFlag
}

func (c migrateUpCmd) Run(e *env) error {
	url, err := c.url(e)
	if err != nil {
		return err
	}
	report, err := migrations.Up(e.ctx, url)
	if err == nil || len(report.Applied)+len(report.River) > 0 {
		printReport(e.stdout, report)
	}
	return err
}

func printReport(w io.Writer, r migrations.Report) {
	if r.Waited.Seconds() >= 1 {
		fmt.Fprintf(w, "Waited %.0f s for another node that was migrating.\n", r.Waited.Seconds())
	}
	if len(r.Applied)+len(r.River) == 0 {
		fmt.Fprintln(w, "Nothing to apply: the schema is this version's.")
		return
	}
	for _, m := range r.Applied {
		fmt.Fprintf(w, "applied %s\n", m)
	}
	if len(r.River) > 0 {
		fmt.Fprintf(w, "applied job queue: %s\n", strings.Join(r.River, ", "))
	}
	fmt.Fprintf(w, "Done in %d ms.\n", r.Took.Milliseconds())
}

type migrateStatusCmd struct {
	databaseFlag
}

func (c migrateStatusCmd) Run(e *env) error {
	pool, err := c.open(e)
	if err != nil {
		return err
	}
	defer pool.Close()
	state, err := migrations.Status(e.ctx, pool)
	if err != nil {
		return err
	}
	for _, m := range state.Applied {
		fmt.Fprintf(e.stdout, "applied  %s\n", m)
	}
	for _, m := range state.Pending {
		fmt.Fprintf(e.stdout, "missing  %s\n", m)
	}
	for _, m := range state.Unknown {
		fmt.Fprintf(e.stdout, "unknown  %s (of a newer version of the program)\n", m)
	}
	for _, m := range state.RiverPending {
		fmt.Fprintf(e.stdout, "missing  job queue: %s\n", m)
	}
	fmt.Fprintf(e.stdout, "job queue: %d applied, %d missing\n", len(state.RiverApplied), len(state.RiverPending))
	// What is missing or unknown is in the list; the error says what to do.
	switch err := state.Err(); {
	case errors.Is(err, migrations.ErrPending):
		return fmt.Errorf("%w; run `server migrate up`", migrations.ErrPending)
	case errors.Is(err, migrations.ErrTooNew):
		return fmt.Errorf("%w; run the newer program", migrations.ErrTooNew)
	default:
		return err
	}
}
