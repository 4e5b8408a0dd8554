package cluster

import "slices"

const (
	filterSize = 8
	// drift is the most by which two machines' clocks are taken to part, per nanosecond: 100 ppm, five times what quartz does.
	drift = 1e-4
	// granularity is the clocks' own: Postgres counts microseconds, and both sides' readings jitter with the scheduler.
	granularity = 50_000 // ns
)

// reading is one comparison of our clock with another: the other was read between two readings of ours, delay apart, so
// the true offset lies within half the delay of offset, whichever way the time went.
type reading struct {
	offset int64 // the other clock less ours at the middle, ns
	delay  int64 // ns
	at     int64 // our clock, ns
}

// bound is how far off the offset may be at time now.
func (r reading) bound(now int64) int64 {
	return r.delay/2 + granularity + int64(drift*float64(max(now-r.at, 0)))
}

// clockFilter keeps the last readings and believes the one with the least doubt. Not safe for concurrent use.
type clockFilter struct{ last []reading }

// add takes a reading and returns the offset to go by. A reading that can't be true together with the best one means that
// a clock was set: what was known is forgotten.
func (f *clockFilter) add(r reading) int64 {
	if len(f.last) > 0 {
		best := f.best(r.at)
		if d := r.offset - best.offset; max(d, -d) > r.bound(r.at)+best.bound(r.at) {
			f.last = f.last[:0]
		}
	}
	if len(f.last) == filterSize {
		f.last = slices.Delete(f.last, 0, 1)
	}
	f.last = append(f.last, r)
	return f.best(r.at).offset
}

func (f *clockFilter) best(now int64) reading {
	return slices.MinFunc(f.last, func(a, b reading) int { return int(a.bound(now) - b.bound(now)) })
}

// median of a set that is not empty; of an even one the mean of the two in the middle.
func median(v []int64) int64 {
	v = slices.Sorted(slices.Values(v))
	low, high := v[(len(v)-1)/2], v[len(v)/2]
	return low + (high-low)/2
}
