package ratelimit

import (
	"math/rand/v2"
	"testing"
)

// TestSketchBounds counts streams of several shapes beside an exact count, and holds the sketch to what it promises.
func TestSketchBounds(t *testing.T) {
	t.Parallel()
	key := func(n uint64) Key { return Key{Hi: n + 2, Lo: n * 0x9E3779B97F4A7C15} }
	for name, draw := range map[string]func(*rand.Rand, int) uint64{
		"even over many":       func(r *rand.Rand, _ int) uint64 { return r.Uint64N(100_000) },
		"few":                  func(r *rand.Rand, _ int) uint64 { return r.Uint64N(sketchLen) },
		"skewed":               func(r *rand.Rand, _ int) uint64 { return rand.NewZipf(r, 1.1, 1, 1_000_000).Uint64() },
		"all new":              func(_ *rand.Rand, i int) uint64 { return uint64(i) },
		"heavy behind a flood": func(r *rand.Rand, i int) uint64 { return []uint64{7, uint64(1000 + i)}[r.IntN(100)/97] },
		"late":                 func(_ *rand.Rand, i int) uint64 { return []uint64{uint64(1000 + i), 7}[i/10_000] },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(1, 2))
			s, exact, total := newSketch(), map[Key]uint64{}, uint64(0)
			for i := range 20_000 {
				k, weight := key(draw(r, i)), uint64(1)<<r.IntN(4)
				s.add(k, weight)
				exact[k] += weight
				total += weight
			}
			if s.total != total || len(s.heap) > sketchLen || len(s.place) != len(s.heap) {
				t.Fatalf("total %d, want %d; %d keys, %d places", s.total, total, len(s.heap), len(s.place))
			}
			for k, n := range exact {
				switch h := s.get(k); {
				case h == nil && n > total/sketchLen:
					t.Fatalf("a key with %d of %d is not held", n, total)
				case h == nil:
				case h.key != k || h.count < n || h.least() > n || h.over > total/sketchLen:
					t.Fatalf("%d of %d are counted as %d to %d", n, total, h.least(), h.count)
				}
			}
			for i := range s.heap {
				if parent := (i - 1) / 2; i > 0 && s.heap[parent].count > s.heap[i].count {
					t.Fatal("the lightest is not the first to go")
				}
			}
		})
	}
}
