package main

import (
	"testing"

	"converger/internal/postgres"
	"converger/migrations/pgtest"
)

// A channel that is paused on one node, in the middle of a load, gets nothing from any node; when it is resumed on the other,
// everything comes, once and in order.
func TestPauseOnEveryNode(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	pool := pgtest.Open(t, url, postgres.Options{MaxConns: 2})
	here, there := serve(t, url, noLimits), serve(t, url, noLimits)
	own := newEndpoint(t)
	c := newCustomer(t, management(t, here, url), "Tenant")
	ch := c.newChannel(t, "webhook", "outbound", map[string]any{"url": own.url}).ID
	l := startLoad(t, c, []string{c.newConversation(t, ch), c.newConversation(t, ch), c.newConversation(t, ch)}, 6)
	l.awaitMore(t, 50)

	type state struct {
		Circuit string `json:"circuit_state"`
		Parked  int    `json:"parked_deliveries"`
	}
	path := "/api/v1/channels/" + ch
	elsewhere := newAPI(t, there.base, "X-Api-Key", c.api.header.Get("X-Api-Key"))
	if st := data[state](t, elsewhere.call(t, 200, "POST", path+"/pause", "")); st.Circuit != "paused" {
		t.Errorf("paused: %+v", st)
	}
	eventually(t, patience, "every worker to leave its lane", func() bool {
		return count(t, pool, `SELECT count(*) FROM lanes WHERE lease_token IS NOT NULL`) == 0
	})
	arrived := len(own.arrivals())
	l.awaitMore(t, 50)
	if n := len(own.arrivals()); n != arrived {
		t.Errorf("%d deliveries came while paused", n-arrived)
	}
	stored := l.verify(t)
	total := 0
	for _, all := range stored {
		total += len(all)
	}
	if st := data[state](t, c.api.call(t, 200, "GET", path+"/delivery", "")); st.Parked != total-arrived || arrived == 0 {
		t.Errorf("%+v, want %d of %d parked", st, total-arrived, total)
	}
	if st := data[state](t, c.api.call(t, 200, "POST", path+"/resume", "")); st.Circuit != "closed" || st.Parked != 0 {
		t.Errorf("resumed: %+v", st)
	}
	if n := own.delivered(t, stored, patience); n > 0 {
		t.Errorf("%d deliveries came twice", n)
	}
}
