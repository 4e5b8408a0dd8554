package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"converger/internal/postgres"
	"converger/migrations"
)

type migrateCmd struct {
	Up     migrateUpCmd     `cmd:"" help:"Apply what is missing. Safe to run on several nodes at once, and again."`
	Status migrateStatusCmd `cmd:"" help:"Show what is applied and what is missing. Changes nothing; fails when something is missing."`
}

// databaseFlag is how commands that need nothing but the database find it.
type databaseFlag struct {
	DatabaseURL string `help:"The database; default is the environment's DATABASE_URL or DATABASE_URL_FILE." placeholder:"postgres://…"`
}

func (f databaseFlag) url(e *env) (string, error) {
	if f.DatabaseURL != "" {
		return f.DatabaseURL, nil
	}
	for _, s := range settings {
		if s.name != "DATABASE_URL" {
			continue
		}
		value, err := s.value(e.getenv)
		if err != nil {
			return "", err
		}
		if value != "" {
			return value, nil
		}
	}
	return "", errors.New("which database? Set DATABASE_URL, or pass --database-url postgres://user:password@host/database")
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
	url, err := c.url(e)
	if err != nil {
		return err
	}
	pool, err := postgres.Open(e.ctx, url, postgres.Options{MaxConns: 2, AppName: "converger migrate"})
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
