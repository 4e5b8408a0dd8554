package main

import "testing"

func TestParseStat(t *testing.T) {
	t.Parallel()
	line := "4242 (a b) c) S 17 4242 4242 0 -1 4194560 10 20 0 0 100 23 7 5 20 0 1 0 9999 1000 200 18446744073709551615\n"
	if got, want := parseStat([]byte(line)), (ticks{own: 123, waited: 12, parent: 17}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := parseStat([]byte("nothing")); got != (ticks{}) {
		t.Errorf("of nothing: %+v", got)
	}
}
