package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/channel"
	"converger/internal/secrets"
	"converger/internal/secrets/rotate"
	"converger/internal/tenants"
)

// secretsCmd works straight on the database, beside running nodes or without any.
type secretsCmd struct {
	Status secretsStatusCmd `cmd:"" help:"Show which keys have sealed what is stored. Changes nothing; fails when something is not under CLOAK_KEY."`
	Rotate secretsRotateCmd `cmd:"" help:"Seal everything anew under CLOAK_KEY. Safe beside running nodes, and again when it was interrupted."`
}

// sealedColumns is every column of the database that holds sealed values.
func sealedColumns() []secrets.Column {
	return slices.Concat(channel.SealedColumns())
}

// ring is the keys of the environment, and what each is called there.
type ring struct {
	box   *secrets.Box
	order []secrets.KeyID
	roles map[secrets.KeyID]string
}

func newRing(getenv func(string) string) (ring, error) {
	cfg, err := loadSettings(getenv, func(name string) bool { return strings.HasPrefix(name, "CLOAK_") })
	if err != nil {
		return ring{}, err
	}
	r := ring{roles: map[secrets.KeyID]string{}}
	if r.box, err = newBox(cfg); err != nil {
		return ring{}, err
	}
	r.order, r.roles[r.box.Current()] = []secrets.KeyID{r.box.Current()}, "CLOAK_KEY"
	for i, text := range cfg.RetiredKeys {
		key, err := decodeKey(text.Reveal())
		if err != nil {
			return ring{}, err
		}
		if id := secrets.IDOf(key); r.roles[id] == "" {
			r.order, r.roles[id] = append(r.order, id), fmt.Sprintf("CLOAK_RETIRED_KEYS, number %d", i+1)
		}
	}
	return r, nil
}

var errNotRotated = errors.New("not everything is sealed by CLOAK_KEY")

type secretsStatusCmd struct {
	databaseFlag
	Verify bool `help:"Open every value as well, and name those that do not open."`
}

func (c secretsStatusCmd) Run(e *env) error {
	return c.withRing(e, func(pool *pgxpool.Pool, keys ring) error {
		rotator := rotate.New(pool, keys.box, sealedColumns())
		uses, err := rotator.Status(e.ctx)
		if err != nil {
			return err
		}
		err = keys.show(e.stdout, uses)
		if !c.Verify {
			return err
		}
		report, verr := rotator.Verify(e.ctx, newTicker(e.stderr, "opened").tick)
		if verr != nil {
			return errors.Join(err, verr)
		}
		if report.Unopened == 0 {
			fmt.Fprintln(e.stdout, "Every value opens.")
		}
		return errors.Join(err, tellUnopened(e.stdout, report))
	})
}

// show prints which keys are in use, and what may be done with those that are not.
func (r ring) show(w io.Writer, uses []rotate.Use) error {
	const stranger = "unknown to this environment"
	type line struct {
		values int64
		where  []string
	}
	lines := map[secrets.KeyID]*line{}
	for _, id := range r.order {
		lines[id] = &line{}
	}
	var unsealed, elsewhere, unknown int64
	for _, u := range uses {
		if !u.Sealed {
			unsealed += u.Values
			fmt.Fprintf(w, "%d value(s) of %s are no sealed values.\n", u.Values, u.Column)
			continue
		}
		if lines[u.Key] == nil {
			lines[u.Key] = &line{}
		}
		l := lines[u.Key]
		l.values += u.Values
		l.where = append(l.where, fmt.Sprintf("%s %d", u.Column, u.Values))
		switch {
		case !r.box.Knows(u.Key):
			unknown += u.Values
		case u.Key != r.box.Current():
			elsewhere += u.Values
		}
	}
	strangers := slices.SortedFunc(maps.Keys(lines), func(a, b secrets.KeyID) int { return cmp.Compare(a.String(), b.String()) })
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(tw, "KEY\tIN THE ENVIRONMENT\tVALUES\tWHERE")
	for _, id := range append(slices.Clone(r.order), slices.DeleteFunc(strangers, r.box.Knows)...) {
		l, note := lines[id], ""
		if l.values == 0 && id != r.box.Current() {
			note = "no longer needed"
		}
		fmt.Fprintf(tw, "%s\t%s\t%d\t%s\n", id, cmp.Or(r.roles[id], stranger), l.values, cmp.Or(strings.Join(l.where, ", "), note, "–"))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	var problems []string
	if elsewhere > 0 {
		problems = append(problems, fmt.Sprintf("%d value(s) need a retired key: run `server secrets rotate`, and keep CLOAK_RETIRED_KEYS until then", elsewhere))
	}
	if unknown > 0 {
		problems = append(problems, fmt.Sprintf("%d value(s) need a key that is not here: put it into CLOAK_RETIRED_KEYS, or they are lost", unknown))
	}
	if unsealed > 0 {
		problems = append(problems, fmt.Sprintf("%d value(s) are damaged", unsealed))
	}
	if len(problems) > 0 {
		return fmt.Errorf("%w: %s", errNotRotated, strings.Join(problems, "; "))
	}
	fmt.Fprintln(w, "Everything is sealed by CLOAK_KEY. Once every node runs with it, keys marked \"no longer needed\" can be taken out of CLOAK_RETIRED_KEYS.")
	return nil
}

type secretsRotateCmd struct {
	databaseFlag
}

func (c secretsRotateCmd) Run(e *env) error {
	return c.withRing(e, func(pool *pgxpool.Pool, keys ring) error {
		report, err := rotate.New(pool, keys.box, sealedColumns()).Rotate(e.ctx, newTicker(e.stderr, "looked at").tick)
		if report.Renewed > 0 {
			err = errors.Join(err, recordRotation(context.WithoutCancel(e.ctx), pool, keys.box.Current(), report))
		}
		if err == nil || report.Renewed > 0 {
			fmt.Fprintf(e.stdout, "%d value(s) sealed anew by CLOAK_KEY (%s).\n", report.Renewed, keys.box.Current())
		}
		if err != nil {
			return fmt.Errorf("%w\nWhat was done stays done; run it again to go on", err)
		}
		var left error
		if report.Left > 0 {
			left = fmt.Errorf("%w: %d value(s) changed while they were looked at; run it again. If that stays so, a node still runs with another CLOAK_KEY",
				errNotRotated, report.Left)
		}
		return errors.Join(left, tellUnopened(e.stdout, report))
	})
}

// recordRotation leaves a row in the audit log. What was rotated has not changed in meaning, so no node has to reload.
func recordRotation(ctx context.Context, pool *pgxpool.Pool, id secrets.KeyID, report rotate.Report) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		return tenants.AuditTx(ctx, tx, byCommandLine(), tenants.Entry{Action: "rotate", ResourceType: "encryption_key", ResourceID: id.String(),
			After: map[string]any{"values_sealed_anew": report.Renewed, "not_opened": report.Unopened, "left": report.Left}})
	})
}

// tellUnopened names the values that do not open; nil when there are none.
func tellUnopened(w io.Writer, report rotate.Report) error {
	for _, u := range report.Named {
		fmt.Fprintf(w, "%s of row %s: %v\n", u.Column, u.Row, u.Err)
	}
	if more := report.Unopened - len(report.Named); more > 0 {
		fmt.Fprintf(w, "… and %d more\n", more)
	}
	if report.Unopened > 0 {
		return fmt.Errorf("%d value(s) do not open and were left as they are: give the key that sealed them in CLOAK_RETIRED_KEYS, or set these secrets anew", report.Unopened)
	}
	return nil
}

// ticker prints the progress of a long walk, at most once a second.
type ticker struct {
	w    io.Writer
	verb string
	last time.Time
}

func newTicker(w io.Writer, verb string) *ticker { return &ticker{w: w, verb: verb, last: time.Now()} }

func (t *ticker) tick(p rotate.Progress) {
	if time.Since(t.last) < time.Second {
		return
	}
	t.last = time.Now()
	fmt.Fprintf(t.w, "%s: %d %s, %d sealed anew in all, %d do not open\n", p.Column, p.Seen, t.verb, p.Report.Renewed, p.Report.Unopened)
}
