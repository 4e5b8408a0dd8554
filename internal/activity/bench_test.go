package activity

import (
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// BenchmarkAppend compares group commit with one transaction for each activity, in turns on the same database; an
// operation is a round of both. Each activity has a key and one delivery, and the callers spread over 64 conversations.
func BenchmarkAppend(b *testing.B) {
	for _, callers := range []int{1, 32, 128} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			w := newWorld(b, Options{})
			convs := make([]uuid.UUID, 64)
			for i := range convs {
				convs[i] = w.newConversation(b)
			}
			post := func(i int) New {
				n := w.keyed(uuid.NewString(), "Hello, is the shop open on Sundays?")
				n.ConversationID = convs[i%len(convs)]
				return n
			}
			grouped := func(i int) {
				if r := w.store.Append(b.Context(), []New{post(i)})[0]; r.Err != nil {
					b.Error(r.Err)
				}
			}
			single := func(i int) {
				var after func()
				err := pgx.BeginFunc(b.Context(), w.pool, func(tx pgx.Tx) error {
					r, done, err := w.store.AppendTx(b.Context(), tx, []New{post(i)})
					if err == nil {
						after, err = done, r[0].Err
					}
					return err
				})
				if err != nil {
					b.Error(err)
					return
				}
				after()
			}
			const each = 8
			round := func(do func(int)) time.Duration {
				begun := time.Now()
				var wg sync.WaitGroup
				for c := range callers {
					wg.Go(func() {
						for range each {
							do(c)
						}
					})
				}
				wg.Wait()
				return time.Since(begun)
			}
			round(grouped)
			round(single)
			var group, alone time.Duration
			rounds := 0
			b.ReportAllocs()
			for b.Loop() {
				group += round(grouped)
				alone += round(single)
				rounds++
			}
			posts := float64(rounds * callers * each)
			b.ReportMetric(posts/group.Seconds(), "grouped/s")
			b.ReportMetric(posts/alone.Seconds(), "single/s")
			b.ReportMetric(alone.Seconds()/group.Seconds(), "ratio")
		})
	}
}

// BenchmarkAppendGrouped is the group commit alone, for profiles; an operation is one activity of 128 callers.
func BenchmarkAppendGrouped(b *testing.B) {
	w := newWorld(b, Options{})
	convs := make([]uuid.UUID, 64)
	for i := range convs {
		convs[i] = w.newConversation(b)
	}
	tickets := make(chan int)
	var wg sync.WaitGroup
	for range 128 {
		wg.Go(func() {
			for i := range tickets {
				n := w.keyed(uuid.NewString(), "Hello, is the shop open on Sundays?")
				n.ConversationID = convs[i%len(convs)]
				if r := w.store.Append(b.Context(), []New{n})[0]; r.Err != nil {
					b.Error(r.Err)
				}
			}
		})
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		tickets <- i
		i++
	}
	close(tickets)
	wg.Wait()
}

func BenchmarkValidate(b *testing.B) {
	text := "Hello, is the shop open on Sundays?"
	for name, n := range map[string]New{
		"text": {Sender: "user", Text: &text},
		"rich": {
			Sender: "user", Text: &text, Metadata: raw(`{"locale":"de","tags":["a","b"],"order":{"id":12}}`),
			Attachments: []json.RawMessage{raw(`{"contentType":"image/png","contentUrl":"https://example.org/a.png","size":1200}`)},
		},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				n := n
				if err := Validate(&n); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkCanonical(b *testing.B) {
	a := Activity{
		ID: uuid.New(), Type: TypeMessage, Sender: "user", Text: ptr("Hello, is the shop open on Sundays? Grüße"), Seq: 7,
		Metadata: raw(`{"locale":"de"}`), InsertedAt: time.Now(), IdempotencyKey: ptr("abc"),
	}
	b.ReportAllocs()
	for b.Loop() {
		a.Canonical()
	}
}
