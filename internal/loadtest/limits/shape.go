package limits

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
)

// Load is how requests arrive: at which nodes, and when.
type Load string

// The loads. Times are in windows of the limit.
const (
	Even   Load = "even"   // the same at every node
	Zipf   Load = "zipf"   // node k gets 1/k of what the first gets
	Sticky Load = "sticky" // all at the first node
	Spike  Load = "spike"  // all within 0.005 of a window at one node, every 1.3 windows at the next
	Bursts Load = "bursts" // on for 0.3 of every 1.7 windows, the same at every node
	Cold   Load = "cold"   // nothing for five windows, then one of flood at every node
	Moving Load = "moving" // all at one node, every 0.35 of a window at the next
)

// Loads lists them all.
func Loads() []Load { return []Load{Even, Zipf, Sticky, Spike, Bursts, Cold, Moving} }

// ParseLoad reads a load's name.
func ParseLoad(s string) (Load, error) {
	if l := Load(s); slices.Contains(Loads(), l) {
		return l, nil
	}
	var names []string
	for _, l := range Loads() {
		names = append(names, string(l))
	}
	return "", fmt.Errorf("there is no load %q: the loads are %s", s, strings.Join(names, ", "))
}

// pulse is a rate that is on for a part of every period.
type pulse struct{ rate, period, start, length float64 }

// before is what a pulse has given from time 0 to t.
func (p pulse) before(t float64) float64 {
	k := math.Floor(t / p.period)
	return p.rate * (k*p.length + min(max(t-k*p.period-p.start, 0), p.length))
}

// pulse is the load of node i of n.
func (l Load) pulse(i, n int) pulse {
	k, nodes := float64(i), float64(n)
	switch l {
	case Zipf:
		sum := 0.0
		for j := range n {
			sum += 1 / float64(j+1)
		}
		return pulse{1 / (k + 1) / sum, 1, 0, 1}
	case Sticky:
		if i > 0 {
			return pulse{0, 1, 0, 1}
		}
		return pulse{1, 1, 0, 1}
	case Spike:
		const length = 0.005
		return pulse{1 / length, 1.3 * nodes, 1.3 * k, length}
	case Moving:
		return pulse{1, 0.35 * nodes, 0.35 * k, 0.35}
	case Bursts:
		return pulse{1 / nodes, 1.7, 0, 0.3}
	case Cold:
		return pulse{1 / nodes, coldPeriod, coldPeriod - 1, 1}
	}
	return pulse{1 / nodes, 1, 0, 1}
}

const coldPeriod = 6

// Due is how many times a limit node i of n is offered from one time to another, both in windows since the load began,
// when the load is factor times the limit.
func (l Load) Due(i, n int, from, to, factor float64) float64 {
	p := l.pulse(i, n)
	return factor * (p.before(to) - p.before(from))
}

// Settling is how many windows are left out at the beginning: in the first ones a node does not know yet what is asked of
// the others. Of a cold flood they are what it is about.
func (l Load) Settling() int {
	if l == Cold {
		return 0
	}
	return 2
}

// Windows is the length of a run that shows what the load is about.
func (l Load) Windows() int {
	switch l {
	case Cold, Bursts, Spike:
		return 4 * coldPeriod
	}
	return 12
}

// Arrivals turns what is due into requests. One goroutine uses it.
type Arrivals struct {
	random *rand.Rand
	exact  bool
	rest   float64 // of a request, that was due and has not arrived
}

// NewArrivals makes the arrivals of a load at one place. They come as from many callers that know nothing of each other
// (Poisson), but where a load is to stay below the limit: there as many come as are due.
func NewArrivals(l Load, r *rand.Rand) *Arrivals {
	return &Arrivals{random: r, exact: l == Sticky || l == Spike}
}

// Next is how many arrive where so many are due.
func (a *Arrivals) Next(due float64) int {
	if a.exact {
		a.rest += due
		n := math.Floor(a.rest + 1e-9) // the sum of many parts of one is hardly ever whole
		a.rest -= n
		return int(n)
	}
	return poisson(a.random, due)
}

// poisson draws from a Poisson distribution, above a mean of 30 from its normal approximation.
func poisson(r *rand.Rand, mean float64) int {
	if mean <= 0 {
		return 0
	}
	if mean > 30 {
		return int(max(0, math.Round(mean+math.Sqrt(mean)*r.NormFloat64())))
	}
	least, k, p := math.Exp(-mean), 0, 1.0
	for {
		if p *= r.Float64(); p <= least {
			return k
		}
		k++
	}
}
