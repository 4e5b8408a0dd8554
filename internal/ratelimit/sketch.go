package ratelimit

// sketchLen is how many keys a sketch holds: a key with more than 1/256 of what
// was counted is certain to be among them.
const sketchLen = 256

// sketch finds the heaviest keys of a stream in bounded memory: Space-Saving
// (Metwally, Agrawal, El Abbadi: Efficient Computation of Frequent and Top-k
// Elements in Data Streams, 2005), with weights. Of a total of n, over len keys:
//
//   - count is never below the key's true count, and count-over never above it;
//   - over is at most n/sketchLen, as is the true count of a key that is not held.
//
// It allocates when it is made and not when it counts. Its user locks.
type sketch struct {
	heap  []heavy     // the least count first, as container/heap would have it
	place map[Key]int // in heap
	total uint64
}

// heavy is one key of a sketch.
type heavy struct {
	key         Key
	count, over uint64
	name        Name
}

// least is what has certainly been counted.
func (h *heavy) least() uint64 { return h.count - h.over }

func newSketch() *sketch {
	return &sketch{heap: make([]heavy, 0, sketchLen), place: make(map[Key]int, sketchLen)}
}

// add counts n for a key; the result is good until the next call. A key that finds
// no room takes the place, and the count, of the lightest.
func (s *sketch) add(k Key, n uint64) *heavy {
	s.total += n
	i, known := s.place[k]
	switch {
	case known:
	case len(s.heap) < sketchLen:
		i = len(s.heap)
		s.heap = append(s.heap, heavy{key: k})
		s.place[k] = i
		s.heap[i].count = n
		return &s.heap[s.up(i)]
	default:
		i = 0
		delete(s.place, s.heap[0].key)
		s.heap[0] = heavy{key: k, count: s.heap[0].count, over: s.heap[0].count}
		s.place[k] = 0
	}
	s.heap[i].count += n
	return &s.heap[s.down(i)]
}

// get finds a key that is held, nil for others; s may be nil.
func (s *sketch) get(k Key) *heavy {
	if s == nil {
		return nil
	}
	if i, ok := s.place[k]; ok {
		return &s.heap[i]
	}
	return nil
}

func (s *sketch) up(i int) int {
	for i > 0 {
		parent := (i - 1) / 2
		if s.heap[parent].count <= s.heap[i].count {
			break
		}
		s.swap(i, parent)
		i = parent
	}
	return i
}

func (s *sketch) down(i int) int {
	for {
		child := 2*i + 1
		if child+1 < len(s.heap) && s.heap[child+1].count < s.heap[child].count {
			child++
		}
		if child >= len(s.heap) || s.heap[i].count <= s.heap[child].count {
			return i
		}
		s.swap(i, child)
		i = child
	}
}

func (s *sketch) swap(i, j int) {
	s.heap[i], s.heap[j] = s.heap[j], s.heap[i]
	s.place[s.heap[i].key], s.place[s.heap[j].key] = i, j
}
