package tenants

import (
	"sync"
	"testing"

	"pgregory.net/rapid"
)

type item struct{ key, value int }

// crowded puts all keys into few spots, so that searches pass over other entries and over marks.
func newCrowdedIndex() *index[int, item] {
	return newIndex(0, func(i *item) int { return i.key }, func(k int) uint64 { return uint64(k % 3) })
}

func TestIndexAgreesWithMap(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		x, model := newCrowdedIndex(), map[int]int{}
		key := rapid.IntRange(0, 40)
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				k, v := key.Draw(t, "key"), rapid.Int().Draw(t, "value")
				x.put(&item{k, v})
				model[k] = v
			},
			"remove": func(t *rapid.T) {
				k := key.Draw(t, "key")
				x.remove(k)
				delete(model, k)
			},
			"": func(t *rapid.T) {
				if x.len() != len(model) {
					t.Fatalf("%d entries, want %d", x.len(), len(model))
				}
				for k := range 41 {
					e, ok := x.get(k)
					v, want := model[k]
					if ok != want || ok && e.value != v {
						t.Fatalf("get(%d) = %v, %v; want %v, %v", k, e, ok, v, want)
					}
				}
				seen := map[int]int{}
				for e := range x.all() {
					seen[e.key] = e.value
				}
				if len(seen) != len(model) {
					t.Fatalf("all gives %v, want %v", seen, model)
				}
			},
		})
	})
}

// TestIndexReadersNeverMissAnUntouchedEntry reads beside a writer that adds, replaces, removes and grows.
func TestIndexReadersNeverMissAnUntouchedEntry(t *testing.T) {
	t.Parallel()
	x := newCrowdedIndex()
	const kept, rounds = 20, 120
	for k := range kept {
		x.put(&item{k, 0})
	}
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				for k := range kept {
					if _, ok := x.get(k); !ok {
						t.Errorf("entry %d not found", k)
						return
					}
				}
			}
		})
	}
	for round := range rounds {
		for k := range kept {
			x.put(&item{k, round})
		}
		for k := kept; k < kept+round%60; k++ {
			x.put(&item{k, round})
		}
		for k := kept; k < kept+60; k++ {
			x.remove(k)
		}
	}
	close(stop)
	readers.Wait()
	if slots := len(*x.table.Load()); slots > 512 {
		t.Errorf("%d slots for %d entries: removed ones are not given back", slots, x.len())
	}
}
