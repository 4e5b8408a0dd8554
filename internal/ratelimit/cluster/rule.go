package cluster

import (
	"math"
	"time"
)

// The rule by which nodes share a limit, as pure functions. Counts are units of
// the limit, times are seconds, rates are units per second.
//
// A node admits while
//
//	own + Σ reported + Σ expected < limit
//
// where reported is what each peer last said it has admitted, and expected is
// dead reckoning of what it may have admitted since. Expecting too little
// overshoots; expecting too much refuses what the limit has room for, until the
// peer's next report gives it back. Nobody reports on a schedule that grows with
// requests: a report is due when the others' picture of this node has become
// wrong by a part of what is left.

const (
	// quanta is the number of early reports in which a node's even share of what
	// is left of a limit is used up.
	quanta = 4
	// minGap is the least time between two reports of one key.
	minGap = 2 * time.Millisecond
	// demandTau is the time constant of the average of demand.
	demandTau = 200 * time.Millisecond
	// idleParts: a key is not worth a regular report while its node has spent,
	// or is expected by the others to have spent, less than one idleParts*N-th
	// of the limit since the last one.
	idleParts = 32
	// longestSilence is how long a key may go on without a regular report on
	// these grounds.
	longestSilence = 30 * time.Second
)

// quantum is how much a node admits of a key before it tells the others at once,
// when it believes that left remains and n nodes share it: the nearer the limit,
// the smaller.
func quantum(left float64, n int) float64 { return max(1, left/float64(quanta*n)) }

// tokenQuantum is quantum for token buckets. A drained bucket would have every
// single admission reported: it is not below the part of what refills between
// two regular reports.
func tokenQuantum(left, rate, interval float64, n int) float64 {
	return quantum(max(left, rate*interval), n)
}

// worthTelling is how much others may be wrong about a key before a regular
// report is due.
func worthTelling(quota uint32, n int) float64 { return float64(quota) / float64(idleParts*n) }

// averaged moves a demand towards the attempts seen in a whole interval. Attempts
// are counted over whole intervals only: an early report is triggered by
// arrivals, so that a rate taken at that moment is too high.
func averaged(demand, attempts, interval float64) float64 {
	return demand + (1-math.Exp(-interval/demandTau.Seconds()))*(attempts/interval-demand)
}

// mostAlone is the greatest that demand times age will be while a demand falls because
// nobody asks any more.
func mostAlone(demand, age float64) float64 {
	if tau := demandTau.Seconds(); age < tau {
		return demand * tau * math.Exp(age/tau-1)
	}
	return demand * age
}

// rumour is what a node goes by when it guesses what a peer has spent of a key
// since its last report.
type rumour struct {
	demand  float64 // the peer's requests per second, refused ones included
	age     float64 // since its last report was sent; since the window's start if that was before
	left    float64 // what it then believed to remain; of a new window the whole limit
	latency float64 // one way, of its reports
	total   float64 // the demand of all nodes that can be heard, this one included

	worth    float64 // see worthTelling
	interval float64 // between two regular reports
}

// expected is what a peer may have admitted in a window without our knowing: the
// least of four.
func (r rumour) expected(n int) float64 { return r.least(quantum(r.left, n), r.left) }

// expectedTokens is expected for a token bucket, which refills meanwhile.
func (r rumour) expectedTokens(rate, burst float64, n int) float64 {
	return r.least(tokenQuantum(r.left, rate, r.interval, n), min(burst, r.left+rate*r.age))
}

func (r rumour) least(quantum, room float64) float64 {
	if r.demand <= 0 || r.age <= 0 {
		return 0
	}
	// It can't have admitted more than was asked of it.
	all := r.demand * r.age
	// Had it admitted a quantum, it would have said so: after the least gap
	// between two reports, and what it said is under way.
	unsaid := quantum - 1 + r.demand*(minGap.Seconds()+r.latency)
	// Once its part of what it saw left was gone, it stopped by itself. Without
	// this a great flood would lock everybody out.
	part := room * r.demand / max(r.total, r.demand)
	// Silence says something too: at its last regular time it had nothing to tell
	// that is worth it. So it need not tell that nobody asks any more.
	silent := max(r.worth, r.demand*(r.interval+r.latency))
	return max(0, min(all, unsaid, part, silent))
}

// stale tells that a peer which can be heard must have lost interest in a key:
// else a regular report of it would have come.
func (r rumour) stale() bool {
	return r.age > longestSilence.Seconds()+10*r.interval || r.demand*(r.age-2*(r.interval+r.latency)) > r.worth
}

// beyond is how much of a limit must be left to the nodes that can't be heard:
// what they have been heard to have spent, or the share they may take, whichever
// is more.
func beyond(reported, withheld float64) float64 { return max(reported, withheld) }
