package auth

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"hash/crc32"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"converger/internal/tenants"
)

// book is an audit log in memory. One that is stuck writes nothing until its context ends.
type book struct {
	mu      sync.Mutex
	records []tenants.Entry
	stuck   bool
}

func (b *book) Audit(ctx context.Context, _ tenants.Actor, e tenants.Entry) error {
	if b.stuck {
		<-ctx.Done()
		return ctx.Err()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.records = append(b.records, e)
	return nil
}

// written is what was recorded so far.
func (b *book) written() []tenants.Entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.records)
}

var from = netip.MustParseAddr("192.0.2.1")

// oneToken is a directory that knows one operator token.
type oneToken struct {
	Directory
	hash [32]byte
	id   uuid.UUID
}

func (d oneToken) OperatorToken(hash [32]byte) (*tenants.OperatorEntry, bool) {
	if hash != d.hash {
		return nil, false
	}
	return &tenants.OperatorEntry{ID: d.id}, true
}

// newOperatorToken makes a text with the form of an operator token.
func newOperatorToken(t *testing.T) string {
	t.Helper()
	const base62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	body := "cvg_op_" + (rand.Text() + rand.Text())[:43]
	digits := []byte("000000")
	for i, crc := len(digits)-1, crc32.ChecksumIEEE([]byte(body)); i >= 0; i, crc = i-1, crc/62 {
		digits[i] = base62[crc%62]
	}
	text := body + string(digits)
	if _, err := tenants.ParseOperatorToken(text); err != nil {
		t.Fatal(err)
	}
	return text
}

func TestRefusalsAreCapped(t *testing.T) {
	t.Parallel()
	known, unknown := newOperatorToken(t), newOperatorToken(t)
	synctest.Test(t, func(t *testing.T) {
		b := &book{}
		r, err := NewRefusals(b, nil, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		hash, err := tenants.ParseOperatorToken(known)
		if err != nil {
			t.Fatal(err)
		}
		d := oneToken{hash: hash, id: uuid.New()}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()

		r.OperatorToken(d, known, ErrExpired, from, "req_1")
		r.OperatorToken(d, unknown, ErrUnknown, from, "req_2")
		r.OperatorToken(d, "not a token", ErrUnknown, from, "req_3")
		synctest.Wait()
		if len(b.written()) != 2 || b.written()[0].ResourceID != d.id.String() || len(b.written()[1].ResourceID) != 16 {
			t.Errorf("records: %+v", b.written())
		}
		for range 1000 {
			r.OperatorToken(d, unknown, ErrUnknown, from, "")
		}
		synctest.Wait()
		if len(b.written()) > refusalRecordsBurst {
			t.Errorf("%d records at once", len(b.written()))
		}
		time.Sleep(leftOutEvery)
		synctest.Wait()
		last := b.written()[len(b.written())-1]
		if last.Action != "left_out" || last.After.(map[string]any)["records"] != int64(1002-refusalRecordsBurst) {
			t.Errorf("the last record: %+v", last)
		}
		all, err := json.Marshal(b.written())
		if err != nil || strings.Contains(string(all), unknown) || strings.Contains(string(all), known) {
			t.Errorf("a token is in the audit log: %s, %v", all, err)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// A database that does not answer holds nobody up, and fills no memory.
func TestRefusalsDoNotWait(t *testing.T) {
	t.Parallel()
	unknown := newOperatorToken(t)
	synctest.Test(t, func(t *testing.T) {
		r, err := NewRefusals(&book{stuck: true}, nil, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		start := time.Now()
		for range 5000 {
			r.OperatorToken(oneToken{}, unknown, ErrUnknown, from, "")
		}
		if took := time.Since(start); took != 0 || len(r.queue) > refusalQueue {
			t.Errorf("it took %v, and %d wait", took, len(r.queue))
		}
		stop()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
