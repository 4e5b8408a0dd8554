package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"converger/internal/loadtest/hub"
	"converger/internal/loadtest/limits"
	"converger/migrations/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The short form of `make accuracy`: three real nodes, first without the rule, then with it. The first must overshoot, or
// the measurement is not to be trusted; the second is judged if the machine was fit. Not parallel to other tests of the
// package: they would make it less so.
func TestThreeNodes(t *testing.T) {
	b := &bench{database: pgtest.New(t), tries: 1, progress: testWriter{t}}
	t.Cleanup(func() {
		if err := b.rest(); err != nil {
			t.Error(err)
		}
	})
	rows := map[string]row{}
	for _, r := range table() {
		rows[r.key()] = r
	}
	for _, c := range []struct {
		name    string
		windows int
	}{{"plain reports every 101 ms, without the rule, 10x, 3 nodes", 10}, {"even 10x, 3 nodes", 6}} {
		name := c.name
		r, ok := rows[name]
		if !ok {
			t.Fatalf("no row %q", name)
		}
		r.windows = r.load.Settling() + c.windows
		if r.atLeast == 0 { // the race detector makes nodes several times as slow as those for which more is promised
			r.promise = limits.Overshoot(0.05, 0.15)
		}
		results, err := b.measure(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		for _, got := range results {
			f := got.figures
			if f.Windows != c.windows || got.traffic.messages == 0 || got.traffic.delay.Messages == 0 {
				t.Errorf("%s: %+v, %+v", name, f, got.traffic)
			}
			switch {
			case f.Flooded < c.windows:
				t.Logf("%s: not judged: the machine was too busy to offer ten times the limit: %+v", name, f)
			case len(got.broken) > 0:
				t.Errorf("%s, %d/s: %s; %+v", name, got.rule.Limit, strings.Join(got.broken, "; "), got.traffic.delay)
			case got.busy != "":
				t.Logf("%s: not judged: %s", name, got.busy)
			}
		}
	}
}

// The troubles of the table are what nodes take them for: a cut is a split, and heals; who is killed is dead, and another
// one takes its place.
func TestTroubles(t *testing.T) {
	t.Parallel()
	w, err := newWorld(t.Context(), pgtest.New(t), 3, conditions{cuts: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.close(); err != nil {
			t.Error(err)
		}
	})
	sees := func(what string, want ...[2]int) { // visible and alive, by place
		t.Helper()
		var got [][2]int
		err := hub.Until(t.Context(), patience, func() (bool, error) {
			got = nil
			for i := range want {
				v := w.places[i].Load().View()
				got = append(got, [2]int{v.Visible, v.Alive})
			}
			return cmp.Equal(want, got), nil
		})
		if err != nil {
			t.Fatalf("%s: visible and alive are %v, want %v", what, got, want)
		}
	}
	sees("at first", [2]int{3, 3}, [2]int{3, 3}, [2]int{3, 3})
	if err := split(t.Context(), w, time.Now().Add(-time.Minute)); err != nil {
		t.Fatal(err)
	}
	sees("split", [2]int{2, 3}, [2]int{2, 3}, [2]int{1, 3})
	w.roads.set(nil)
	sees("healed", [2]int{3, 3}, [2]int{3, 3}, [2]int{3, 3})
	w.kill(2)
	sees("after a death", [2]int{2, 2}, [2]int{2, 2})
	n, err := w.launch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := w.admit(t.Context(), n, 2, 3); err != nil {
		t.Fatal(err)
	}
	sees("with another one in its place", [2]int{3, 3}, [2]int{3, 3}, [2]int{3, 3})
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

// pipe is a line over a real connection, and its other end.
func pipe(t *testing.T, r *roads) (near net.Conn, far net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	near, err = r.dialer(0, func(string) int { return 1 })(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if far, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { near.Close(); far.Close() })
	return near, far
}

func TestLineDelaysBothWays(t *testing.T) {
	t.Parallel()
	const delay = 30 * time.Millisecond
	near, far := pipe(t, newRoads(delay))
	began, buf := time.Now(), make([]byte, 4)
	for _, way := range []struct{ from, to net.Conn }{{near, far}, {far, near}} {
		if _, err := way.from.Write([]byte("ping")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(way.to, buf); err != nil || string(buf) != "ping" {
			t.Fatalf("%q, %v", buf, err)
		}
	}
	if took := time.Since(began); took < 2*delay {
		t.Errorf("there and back in %s, want %s or more", took, 2*delay)
	}
	if err := far.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := near.Read(buf); !errors.Is(err, io.EOF) {
		t.Errorf("after the other end was closed: %v", err)
	}
}

// What is sent while a road is cut is not lost: it arrives when it is open again, as TCP would have it.
func TestLineIsCut(t *testing.T) {
	t.Parallel()
	r := newRoads(0)
	near, far := pipe(t, r)
	r.set(func(a, b int) bool { return a == 0 && b == 1 })
	for _, way := range []struct{ from, to net.Conn }{{near, far}, {far, near}} {
		if _, err := way.from.Write([]byte("held")); err != nil {
			t.Fatal(err)
		}
	}
	if err := far.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4)
	if n, err := far.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read %q, %v along a road that is cut", buf[:n], err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := r.dialer(1, func(string) int { return 0 })(ctx, "tcp", far.LocalAddr().String()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("dialled along a road that is cut: %v", err)
	}
	r.set(nil)
	if err := far.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	for _, to := range []net.Conn{far, near} {
		if _, err := io.ReadFull(to, buf); err != nil || string(buf) != "held" {
			t.Errorf("after it was opened: %q, %v", buf, err)
		}
	}
	if err := near.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := near.Write(buf); !errors.Is(err, net.ErrClosed) {
		t.Errorf("wrote to a closed line: %v", err)
	}
}

func TestTable(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, r := range table() {
		for _, rule := range r.rules {
			key := fmt.Sprint(r.key(), rule.Limit, rule.Burst)
			if seen[key] {
				t.Errorf("two lines are %q", key)
			}
			seen[key] = true
		}
		if r.first() >= r.count() || len(r.rules) == 0 {
			t.Errorf("%s looks at nothing: %d of %d", r.key(), r.first(), r.count())
		}
		p := r.promise
		if p == (limits.Promise{}) == (r.atLeast == 0) {
			t.Errorf("%s promises %+v, and must show %g", r.key(), p, r.atLeast)
		}
	}
}

func TestJudgeAndWrite(t *testing.T) {
	t.Parallel()
	rows := table()
	plain, even := rows[0], rows[2]
	fit, busy := traffic{messages: 20, bytes: 900, delay: limits.Delay{Messages: 5, P99: 0.5, Max: 3, Wait: 4}}, traffic{delay: limits.Delay{P99: 7, Max: 9}}
	of := func(r row, over float64, tr traffic) result {
		res := result{row: r, rule: r.rules[0], figures: limits.Figures{Over: over, OverWorst: over}, traffic: tr}
		res.judge()
		return res
	}
	for _, c := range []struct {
		result
		want string
	}{
		{of(even, 0.004, fit), "kept"}, {of(even, 0.2, fit), "NOT KEPT"}, {of(even, 0.2, busy), "not judged"}, {of(even, 0.004, busy), "not judged; within"},
		{of(plain, 0.4, fit), "kept"}, {of(plain, 0.4, busy), "kept"}, {of(plain, 0.01, fit), "NOT KEPT"},
	} {
		cells := c.cells()
		if len(cells) != len(columns) || cells[len(cells)-1] != c.want {
			t.Errorf("%v, want %s", cells, c.want)
		}
	}
	text := markdown([]result{of(even, 0.004, fit), of(even, 0.2, busy)}, "a machine", time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	for _, want := range []string{
		"Measured on 2 January 2026 by `make accuracy` on a machine. 1 of 2 rows are not judged",
		"| even 10x | 3     | 100/s | ≤ 1.5 % / ≤ 5 %        | 0.40 % / 0.40 % ", "| 0.50 / 3.0, 4 ms ",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	page, err := embed([]byte("before\n"+beginMark+"old\n"+endMark+"\nafter\n"), "new\n")
	if diff := cmp.Diff("before\n"+beginMark+"new\n"+endMark+"\nafter\n", string(page)); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	if _, err := embed([]byte("a page without a place"), "new\n"); err == nil {
		t.Error("a page without a place took the table")
	}
}

func TestRunRefuses(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--only", "square"}, "no row has"}, {[]string{"--only", "cold", "--write", "x"}, "whole table"}, {[]string{"--tries", "0"}, "--tries"},
		{[]string{"x"}, "unexpected"}, {[]string{"--program", "nowhere/at/all"}, "make build"},
	} {
		var out bytes.Buffer
		if err := run(t.Context(), c.args, &out, &out); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want it to say %q", c.args, err, c.want)
		}
	}
}
