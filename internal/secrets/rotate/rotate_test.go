package rotate_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/postgres"
	"converger/internal/secrets"
	"converger/internal/secrets/rotate"
	"converger/migrations/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

var (
	first  = secrets.Column{Table: "things", Name: "first", Row: "id"}
	second = secrets.Column{Table: "things", Name: "Second one", Row: "id"} // a name that needs quotes
	both   = []secrets.Column{first, second}
)

func key(fill byte) []byte { return bytes.Repeat([]byte{fill}, secrets.KeySize) }

func newBox(t testing.TB, current []byte, retired ...[]byte) *secrets.Box {
	t.Helper()
	b, err := secrets.NewBox(current, retired...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// world is a table of things whose first value is set and whose second is NULL for every second row.
type world struct {
	pool *pgxpool.Pool
	ids  []uuid.UUID
}

func newWorld(t testing.TB, box *secrets.Box, n int) *world {
	t.Helper()
	w := &world{pool: pgtest.Open(t, pgtest.Empty(t), postgres.Options{MaxConns: 4})}
	w.exec(t, `CREATE TABLE things (id uuid PRIMARY KEY, first bytea NOT NULL, "Second one" bytea)`)
	for i := range n {
		id := uuid.Must(uuid.NewV7())
		w.ids = append(w.ids, id)
		var other []byte
		if i%2 == 1 {
			other = box.Seal(plain(second, id), second.Table, second.Name, id)
		}
		w.exec(t, `INSERT INTO things VALUES ($1, $2, $3)`, id, box.Seal(plain(first, id), first.Table, first.Name, id), other)
	}
	return w
}

func plain(c secrets.Column, id uuid.UUID) []byte { return fmt.Appendf(nil, "%s of %s", c, id) }

func (w *world) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	if _, err := w.pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

// check fails the test unless every value opens with the box and is what it was.
func (w *world) check(t testing.TB, box *secrets.Box) {
	t.Helper()
	rows, err := w.pool.Query(t.Context(), `SELECT id, first, "Second one" FROM things`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var id uuid.UUID
		var a, b []byte
		if err := rows.Scan(&id, &a, &b); err != nil {
			t.Fatal(err)
		}
		for c, sealed := range map[secrets.Column][]byte{first: a, second: b} {
			if sealed == nil && c == second {
				continue
			}
			if got, err := box.Open(sealed, c.Table, c.Name, id); err != nil || !bytes.Equal(got, plain(c, id)) {
				t.Errorf("%s of %s: %q, %v", c, id, got, err)
			}
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
}

func (w *world) uses(t testing.TB) []rotate.Use {
	t.Helper()
	uses, err := rotate.New(w.pool, newBox(t, key(1)), both).Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return uses
}

func use(c secrets.Column, k []byte, n int64) rotate.Use {
	return rotate.Use{Column: c, Key: secrets.IDOf(k), Sealed: true, Values: n}
}

func TestRotate(t *testing.T) {
	t.Parallel()
	const n = 250 // three batches
	old := newBox(t, key(1))
	w := newWorld(t, old, n)
	box := newBox(t, key(2), key(1))
	seen := 0
	report, err := rotate.New(w.pool, box, both).Rotate(t.Context(), func(p rotate.Progress) {
		if p.Column == first {
			seen = p.Seen
		}
	})
	if diff := cmp.Diff(rotate.Report{Renewed: n + n/2}, report); err != nil || diff != "" || seen != n {
		t.Errorf("seen %d, %v\n%s", seen, err, diff)
	}
	w.check(t, newBox(t, key(2))) // without the old key
	if diff := cmp.Diff([]rotate.Use{use(first, key(2), n), use(second, key(2), n/2)}, w.uses(t)); diff != "" {
		t.Error(diff)
	}
	again, err := rotate.New(w.pool, box, both).Rotate(t.Context(), nil)
	if diff := cmp.Diff(rotate.Report{}, again); err != nil || diff != "" {
		t.Errorf("a second time: %v\n%s", err, diff)
	}
}

// A run that is cut off is continued by the next one, whatever it has done.
func TestRotateGoesOn(t *testing.T) {
	t.Parallel()
	const n = 300
	w := newWorld(t, newBox(t, key(1)), n)
	rotator := rotate.New(w.pool, newBox(t, key(2), key(1)), both)
	ctx, cancel := context.WithCancel(t.Context())
	cut, err := rotator.Rotate(ctx, func(rotate.Progress) { cancel() })
	if !errors.Is(err, context.Canceled) || cut.Renewed != 100 {
		t.Fatalf("cut off after one batch: %+v, %v", cut, err)
	}
	rest, err := rotator.Rotate(t.Context(), nil)
	if err != nil || rest.Renewed != n+n/2-cut.Renewed {
		t.Errorf("the next run: %+v, %v", rest, err)
	}
	w.check(t, newBox(t, key(2)))
}

// Several runs at once, beside writers that change the same values with the new key and with the old one: nothing that was
// written is lost, and what is left is under the new key but for what was written by the old one last.
func TestRotateBesideOthers(t *testing.T) {
	t.Parallel()
	const n = 200
	old, renewing := newBox(t, key(1)), newBox(t, key(2), key(1))
	w := newWorld(t, old, n)
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			if _, err := rotate.New(w.pool, renewing, both).Rotate(t.Context(), nil); err != nil { // what is left shows below
				t.Errorf("run %d: %v", i, err)
			}
		})
	}
	wg.Go(func() {
		for i, id := range w.ids {
			box := renewing
			if i%3 == 0 {
				box = old
			}
			w.exec(t, `UPDATE things SET first = $2 WHERE id = $1`, id, box.Seal(plain(first, id), first.Table, first.Name, id))
		}
	})
	wg.Wait()
	w.check(t, renewing)
	report, err := rotate.New(w.pool, renewing, both).Rotate(t.Context(), nil)
	if err != nil || report.Left != 0 || report.Unopened != 0 {
		t.Errorf("the last run: %+v, %v", report, err)
	}
	w.check(t, newBox(t, key(2)))
}

// interloper calls its function once, when the first read has ended and nothing is replaced yet.
type interloper struct{ once func() }

type readKey struct{}

func (i interloper) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, readKey{}, strings.HasPrefix(q.SQL, `SELECT "id"`))
}

func (i interloper) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if ctx.Value(readKey{}) == true {
		i.once()
	}
}

// A change between the reading of a value and its replacement is kept, and the value looked at again.
func TestRotateKeepsAChangeInBetween(t *testing.T) {
	t.Parallel()
	old, renewing := newBox(t, key(1)), newBox(t, key(2), key(1))
	w := newWorld(t, old, 1)
	id := w.ids[0]
	traced := pgtest.Open(t, w.pool.Config().ConnString(), postgres.Options{Tracer: interloper{sync.OnceFunc(func() {
		w.exec(t, `UPDATE things SET first = $2 WHERE id = $1`, id, old.Seal([]byte("changed"), first.Table, first.Name, id))
	})}})
	seen := 0
	report, err := rotate.New(traced, renewing, both[:1]).Rotate(t.Context(), func(rotate.Progress) { seen++ })
	if diff := cmp.Diff(rotate.Report{Renewed: 1}, report); err != nil || diff != "" || seen != 2 {
		t.Fatalf("looked %d times, %v\n%s", seen, err, diff)
	}
	var sealed []byte
	if err := w.pool.QueryRow(t.Context(), `SELECT first FROM things`).Scan(&sealed); err != nil {
		t.Fatal(err)
	}
	got, err := newBox(t, key(2)).Open(sealed, first.Table, first.Name, id)
	if err != nil || string(got) != "changed" {
		t.Errorf("%q, %v: the change is lost", got, err)
	}
}

// What does not open is left as it is and named, and the rest is renewed.
func TestRotateWhatDoesNotOpen(t *testing.T) {
	t.Parallel()
	const n = 120
	w := newWorld(t, newBox(t, key(1)), n)
	stranger := newBox(t, key(9))
	w.exec(t, `UPDATE things SET first = $2 WHERE id = $1`, w.ids[0], stranger.Seal([]byte("x"), first.Table, first.Name, w.ids[0]))
	w.exec(t, `UPDATE things SET first = set_byte(first, length(first) - 1, get_byte(first, length(first) - 1) # 1) WHERE id = $1`, w.ids[1])
	w.exec(t, `UPDATE things SET first = '\xff' WHERE id = $1`, w.ids[2])
	want := rotate.Report{Renewed: n - 3 + n/2, Unopened: 3, Named: []rotate.Unopened{
		{Column: first, Row: w.ids[0], Err: secrets.ErrUnknownKey}, {Column: first, Row: w.ids[1], Err: secrets.ErrSealed},
		{Column: first, Row: w.ids[2], Err: secrets.ErrSealed}}}
	rotator := rotate.New(w.pool, newBox(t, key(2), key(1)), both)
	for run := range 2 {
		report, err := rotator.Rotate(t.Context(), nil)
		if diff := cmp.Diff(want, report, cmpopts.EquateErrors()); err != nil || diff != "" {
			t.Errorf("run %d: %v\n%s", run, err, diff)
		}
		want.Renewed = 0
	}
	report, err := rotator.Verify(t.Context(), nil)
	if diff := cmp.Diff(want, report, cmpopts.EquateErrors()); err != nil || diff != "" {
		t.Errorf("verify: %v\n%s", err, diff)
	}
	// In the order of the ids of the keys, the unsealed first or last: its two bytes are no id.
	got := map[string]int64{}
	for _, u := range w.uses(t) {
		if u.Column == first {
			got[fmt.Sprint(u.Sealed, " ", u.Key)] += u.Values
		}
	}
	id := func(k []byte) string { return "true " + secrets.IDOf(k).String() }
	if diff := cmp.Diff(map[string]int64{id(key(1)): 1, id(key(2)): n - 3, id(key(9)): 1, "false 00000000": 1}, got); diff != "" {
		t.Error(diff)
	}
}

// A column that is not there is an error with its name, not a success of nothing.
func TestRotateWithoutTheColumn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newBox(t, key(1)), 1)
	rotator := rotate.New(w.pool, newBox(t, key(2), key(1)), []secrets.Column{{Table: "things", Name: "third", Row: "id"}})
	_, statusErr := rotator.Status(t.Context())
	_, rotateErr := rotator.Rotate(t.Context(), nil)
	_, verifyErr := rotator.Verify(t.Context(), nil)
	for _, err := range []error{statusErr, rotateErr, verifyErr} {
		if err == nil || !strings.Contains(err.Error(), "things.third") {
			t.Errorf("%v", err)
		}
	}
}
