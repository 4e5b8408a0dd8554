package delivery

import (
	"testing"
	"time"
)

// BenchmarkLook is what the dispatcher's tick costs when nothing is due: beside 20,000 lanes of a channel on hold, and
// beside 1,000 channels that each have a lane waiting for its next attempt.
func BenchmarkLook(b *testing.B) {
	for name, seed := range map[string]func(w *world){
		"held": func(w *world) {
			ch := w.newChannel(b, w.tenant, nil)
			seedParked(b, w, ch, 20_000)
			exec(b, w.pool, `UPDATE channels SET hold_until = now() + interval '1 hour'`)
		},
		"waiting": func(w *world) {
			for range 1000 {
				seedParked(b, w, w.newChannel(b, w.tenant, nil), 1)
			}
			exec(b, w.pool, `UPDATE lanes SET next_at = now() + interval '1 hour'`)
		},
	} {
		b.Run(name, func(b *testing.B) {
			w := newWorld(b, Options{})
			seed(w)
			exec(b, w.pool, `VACUUM ANALYZE`)
			w.expired = time.Now().Add(time.Hour)
			for b.Loop() {
				if next, err := w.look(b.Context()); err != nil || next != w.o.Tick {
					b.Fatalf("look: %s, %v", next, err)
				}
			}
		})
	}
}
