package limits

// WindowAt is the number of the window that a moment is in, as the nodes number them: Unix milliseconds by the length.
func WindowAt(unixMs, scaleMs int64) int64 { return unixMs / scaleMs }

// Window is what was decided within one.
type Window struct{ Admitted, Refused int64 }

// Tally counts decisions by their window. The zero value is empty. It is not safe for concurrent use.
type Tally struct{ windows map[int64]Window }

// Add counts a decision.
func (t *Tally) Add(window int64, admitted bool) {
	if t.windows == nil {
		t.windows = map[int64]Window{}
	}
	w := t.windows[window]
	if admitted {
		w.Admitted++
	} else {
		w.Refused++
	}
	t.windows[window] = w
}

// Merge adds what another has counted.
func (t *Tally) Merge(o *Tally) {
	if t.windows == nil {
		t.windows = map[int64]Window{}
	}
	for n, w := range o.windows {
		sum := t.windows[n]
		t.windows[n] = Window{sum.Admitted + w.Admitted, sum.Refused + w.Refused}
	}
}

// Figures is how well a limit was kept. Shares are of the limit: 0.01 is one percent.
type Figures struct {
	Windows  int   `json:"windows"` // that were looked at
	Flooded  int   `json:"flooded"` // of them, offered more than the limit
	Offered  int64 `json:"offered"`
	Admitted int64 `json:"admitted"`
	Refused  int64 `json:"refused"`

	// Over is the mean overshoot of the flooded windows, OverWorst that of the worst.
	Over      float64 `json:"over"`
	OverWorst float64 `json:"over_worst"`
	// RefusedWithin is what was refused although the window ended with room for it, in the worst window.
	RefusedWithin float64 `json:"refused_within"`
	// Unused is the mean over all windows of the same.
	Unused float64 `json:"unused"`
	// LongRun is how much more was admitted in all than the limit allows, or less: a token bucket's measure.
	LongRun float64 `json:"long_run"`
}

// Figures looks at the windows from first to before end; one in which nothing was asked is one of nothing.
func (t *Tally) Figures(limit, first, end int64) Figures {
	f := Figures{Windows: int(max(0, end-first))}
	if f.Windows == 0 {
		return f
	}
	for n := first; n < end; n++ {
		w := t.windows[n]
		offered := w.Admitted + w.Refused
		f.Offered += offered
		f.Admitted += w.Admitted
		f.Refused += w.Refused
		if offered > limit {
			f.Flooded++
			f.Over += share(max(0, w.Admitted-limit), limit)
			f.OverWorst = max(f.OverWorst, share(w.Admitted-limit, limit))
		}
		left := share(max(0, min(limit, offered)-w.Admitted), limit)
		f.RefusedWithin = max(f.RefusedWithin, left)
		f.Unused += left / float64(f.Windows)
	}
	if f.Flooded > 0 {
		f.Over /= float64(f.Flooded)
	}
	f.LongRun = share(f.Admitted, limit*int64(f.Windows)) - 1
	return f
}

func share(n, of int64) float64 { return float64(n) / float64(of) }
