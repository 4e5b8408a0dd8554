package cluster

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

const never = -1 * time.Nanosecond

func TestJudge(t *testing.T) {
	t.Parallel()
	const dead = numStandings // in this table only
	type want [4]Standing     // by witness: none, gone, recent, steady
	for name, test := range map[string]struct {
		s sighting
		w want
	}{
		"heard now":                           {sighting{heard: 0}, want{Visible, Visible, Visible, Visible}},
		"heard half a second ago":             {sighting{heard: visibleFor, row: rowStale}, want{Visible, Visible, Visible, Visible}},
		"heard, though its row is stale":      {sighting{heard: 100 * time.Millisecond, row: rowStale, gossip: true}, want{Visible, Visible, Visible, Visible}},
		"silent, its row fresh":               {sighting{heard: visibleFor + 1, row: rowFresh, gossip: true}, want{Split, Split, Split, Split}},
		"silent for long, its row fresh":      {sighting{heard: time.Hour, row: rowFresh}, want{dead, Split, Split, Split}},
		"silent, its row stale":               {sighting{heard: visibleFor + 1, row: rowStale, gossip: true}, want{Split, Split, Split, dead}},
		"silent, no row yet":                  {sighting{heard: staleAfter - 1, gossip: true}, want{Split, Split, Split, dead - 1}},
		"silent for 3 s, no row":              {sighting{heard: staleAfter, gossip: true}, want{Split, Split, Split, dead}},
		"silent, and gossip lost it too":      {sighting{heard: time.Second}, want{dead, Split, Split, Split}},
		"never heard, gossip brought it":      {sighting{heard: never, gossip: true}, want{Joining, Split, Joining, Joining}},
		"never heard, it serves":              {sighting{heard: never, row: rowFresh}, want{dead, Split, Split, Split}},
		"never heard, gossip and a row":       {sighting{heard: never, row: rowFresh, gossip: true}, want{Joining, Split, Split, Split}},
		"never heard, an old row":             {sighting{heard: never, row: rowStale}, want{dead, Split, dead, dead}},
		"another answers, heard all the same": {sighting{heard: 0, replaced: true}, want{Visible, Visible, Visible, Visible}},
		"another answers at its address":      {sighting{heard: time.Second, replaced: true, row: rowFresh, gossip: true}, want{dead, dead, dead, dead}},
	} {
		for w, want := range test.w {
			got, ok := judge(test.s, witness(w))
			if !ok {
				got = dead
			}
			if got != want {
				t.Errorf("%s, witness %d: %d, want %d", name, w, got, want)
			}
		}
	}
}

func TestMissed(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(1_000_000_000)
	const age = 20 * time.Second
	died := now.Add(-age)
	row := func(id ID, name, address string, age time.Duration) beat {
		return beat{id: id, label: "test", m: member{Name: name, Address: address, Version: "1", Started: died.Add(-time.Hour).UnixMilli()}, age: age}
	}
	lives := func(name, address string, started time.Time) member {
		return member{Name: name, Address: address, Started: started.UnixMilli()}
	}
	one := row(1, "a", "10.0.0.1:7946", age)
	for name, test := range map[string]struct {
		living member
		missed bool
	}{
		"others live":                      {lives("b", "10.0.0.2:7946", now), true},
		"its place is taken":               {lives("b", "10.0.0.1:7946", died.Add(-time.Minute)), false},
		"its name came back elsewhere":     {lives("a", "10.0.0.9:7946", died.Add(time.Second)), false},
		"an older one has the same name":   {lives("a", "10.0.0.2:7946", died.Add(-time.Minute)), true},
		"its machine has another node now": {lives("b", "10.0.0.1:7947", now), true},
	} {
		if got := missed([]beat{one}, []member{lives("me", "10.0.0.3:7946", died), test.living}, now); (len(got) == 1) != test.missed {
			t.Errorf("%s: %v", name, got)
		}
	}
	if got := missed([]beat{row(1, "", "10.0.0.1:7946", age)}, []member{lives("", "10.0.0.2:7946", now)}, now); len(got) != 1 {
		t.Error("two without a name are taken for one")
	}
	// A deploy that goes wrong fills no page, and what is old is forgotten.
	var many []beat
	for i := range 100 {
		many = append(many, row(ID(i+1), "", "10.0.1.1:"+strconv.Itoa(i+1), deadFor-50*time.Second+time.Duration(i)*time.Second))
	}
	got := missed(many, nil, now)
	if len(got) != maxDead || got[0].ID != 1 || got[maxDead-1].ID != maxDead {
		t.Errorf("%d dead: %v", len(got), got)
	}
	if got := missed(many[45:], nil, now); len(got) != 5 {
		t.Errorf("%d dead of the last ten minutes", len(got))
	}
	if cmp.Diff(missed([]beat{one}, nil, now), []Dead{{1, "a", "10.0.0.1:7946", "1", died.Add(-time.Hour), age}}) != "" {
		t.Errorf("%+v", missed([]beat{one}, nil, now))
	}
}

// simulated makes readings of a clock that is off by a true offset, over ways of random length there and back.
func simulated(r *rand.Rand, truth, at int64) reading {
	there, back := r.Int64N(5_000_000), r.Int64N(5_000_000)
	if r.IntN(4) > 0 {
		there, back = there/20, back/20
	}
	return reading{offset: truth + (there-back)/2, delay: there + back, at: at}
}

func TestClockFilter(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var f clockFilter
		truth := r.Int64N(int64(2*time.Hour)) - int64(time.Hour)
		at := int64(0)
		for i := range 50 {
			at += int64(time.Second)
			if i == 25 { // the other clock is set
				truth += int64(time.Second) * (r.Int64N(7200) - 3600)
			}
			x := simulated(r, truth, at)
			got := f.add(x)
			if off := got - truth; max(off, -off) > f.best(at).bound(at) {
				t.Fatalf("reading %d: %d ns off, which is more than the bound %d", i, off, f.best(at).bound(at))
			}
			if f.best(at).bound(at) > x.bound(at) {
				t.Fatalf("reading %d: a worse one is believed", i)
			}
		}
	}
	// A clock that drifts is followed.
	var f clockFilter
	for i := range int64(1000) {
		truth := i * 50_000 // 50 ppm
		if off := f.add(simulated(r, truth, i*int64(time.Second))) - truth; max(off, -off) > 3_000_000 {
			t.Fatalf("after %d s: %d ns off", i, off)
		}
	}
}

func TestMedian(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		v    []int64
		want int64
	}{{[]int64{5}, 5}, {[]int64{9, 1}, 5}, {[]int64{9, -1 << 60, 3}, 3}, {[]int64{4, 1, 3, 100}, 3}} {
		before := slices.Clone(test.v)
		if got := median(test.v); got != test.want || !slices.Equal(before, test.v) {
			t.Errorf("%v: %d, want %d", before, got, test.want)
		}
	}
}

func TestAdvertised(t *testing.T) {
	t.Parallel()
	addrs := func(s string) (out []netip.Addr) {
		for _, a := range strings.Fields(s) {
			out = append(out, netip.MustParseAddr(a))
		}
		return out
	}
	for _, test := range []struct{ local, listed, want string }{
		{"127.0.0.1 ::1 10.1.2.3", "", "10.1.2.3"},
		{"127.0.0.1 203.0.113.7 172.17.0.1", "", "172.17.0.1"},
		{"127.0.0.1 203.0.113.7 172.17.0.1", "203.0.113.6 203.0.113.7", "203.0.113.7"},
		{"127.0.0.1 100.64.0.9", "", "100.64.0.9"},
		{"127.0.0.1 198.51.100.4 fe80::1%eth0", "", "198.51.100.4"},
		{"::1 fe80::1 2001:db8::5", "", "2001:db8::5"},
		{"::1 2001:db8::5 fd00::7", "", "fd00::7"},
		{"127.0.0.1 10.1.2.3", "127.0.0.1", "127.0.0.1"},
		{"127.0.0.1 ::1 fe80::1", "10.0.0.1", ""},
		{"", "", ""},
	} {
		got, err := advertised(addrs(test.local), addrs(test.listed))
		if test.want == "" {
			if !errors.Is(err, errNoAddress) || !strings.Contains(err.Error(), "CLUSTER_ADVERTISE") {
				t.Errorf("%s: %v, %v", test.local, got, err)
			}
		} else if err != nil || got.String() != test.want {
			t.Errorf("%s, listed %s: %v, %v; want %s", test.local, test.listed, got, err, test.want)
		}
	}
}

// book is a resolver whose answers change.
type book map[string][]string

func (b book) LookupNetIP(_ context.Context, network, host string) ([]netip.Addr, error) {
	list, ok := b[host]
	if !ok {
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	var out []netip.Addr
	for _, a := range list {
		out = append(out, netip.MustParseAddr(a))
	}
	return out, nil
}

func TestFinder(t *testing.T) {
	t.Parallel()
	b := book{}
	f := &finder{resolver: b, query: "hub.test:7946", log: slog.New(slog.DiscardHandler)}
	check := func(what string, known bool, want ...string) {
		t.Helper()
		list, ok := f.find(t.Context())
		var got []string
		for _, a := range list {
			got = append(got, a.String())
		}
		if diff := cmp.Diff(want, got); diff != "" || ok != known {
			t.Errorf("%s: known %t\n%s", what, ok, diff)
		}
	}
	check("a name that is not there", false)
	b["hub.test"] = nil
	check("an empty answer", false)
	b["hub.test"] = []string{"10.0.0.2", "2001:db8::1", "10.0.0.1", "10.0.0.2", "::ffff:10.0.0.1"}
	check("both families, each once", true, "10.0.0.1:7946", "10.0.0.2:7946", "[2001:db8::1]:7946")
	delete(b, "hub.test")
	check("a failure keeps the last good answer", true, "10.0.0.1:7946", "10.0.0.2:7946", "[2001:db8::1]:7946")
	b["hub.test"] = nil
	check("so does an empty answer", true, "10.0.0.1:7946", "10.0.0.2:7946", "[2001:db8::1]:7946")
	b["hub.test"] = []string{"10.0.0.9"}
	check("a new answer replaces it", true, "10.0.0.9:7946")

	b = book{"a.test": {"10.0.0.1"}, "b.test": {"10.0.0.2"}}
	f = &finder{resolver: b, peers: []string{"a.test:1", "b.test:2", "10.0.0.3:3", "[::1]:4"}, log: f.log}
	check("a list of names and addresses", true, "10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:3", "[::1]:4")
	delete(b, "a.test")
	b["b.test"] = []string{"10.0.0.5"}
	check("one name fails, another moves", true, "10.0.0.1:1", "10.0.0.3:3", "10.0.0.5:2", "[::1]:4")
}

func TestMemberData(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("n", maxName)
	m := member{Name: long, Address: "[2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]:65535", Version: strings.Repeat("v", maxVersion), Started: 1<<62 - 1}
	b, err := m.encode()
	if err != nil {
		t.Fatal("the longest that can be configured:", err)
	}
	got, err := decodeMember(b)
	if err != nil || got != m {
		t.Errorf("read %+v, %v", got, err)
	}
	for _, bad := range []string{"", "{", `{"name":"` + long + `x"}`, "\x00", strings.Repeat(" ", maxMeta) + "{}"} {
		if got, err := decodeMember([]byte(bad)); err == nil {
			t.Errorf("%q was read as %+v", bad, got)
		}
	}
}

func FuzzDecodeMember(f *testing.F) {
	f.Add([]byte(`{"name":"a","address":"b","started":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, err := decodeMember(b); err == nil && (len(m.Name) > maxName || len(m.Version) > maxVersion) {
			t.Errorf("%+v", m)
		}
	})
}

func TestIDs(t *testing.T) {
	t.Parallel()
	id := newID()
	if got, err := ParseID(id.String()); err != nil || got != id || newID() == id {
		t.Errorf("%s became %s, %v", id, got, err)
	}
	for _, bad := range []string{"", "0000000000000000", "1", "00000000000000001", "g000000000000001", "+000000000000001"} {
		if got, err := ParseID(bad); err == nil {
			t.Errorf("%q is %s", bad, got)
		}
	}
}

func TestConfigCheck(t *testing.T) {
	t.Parallel()
	secret := []byte("s")
	for name, test := range map[string]struct {
		c    Config
		want []string // fields
	}{
		"loopback without a secret":       {Config{Label: "a", Bind: "127.0.0.1:1", Peers: []string{"127.0.0.2:1"}}, nil},
		"IPv6 loopback":                   {Config{Label: "a", Bind: "[::1]:0", Query: "x:1"}, nil},
		"localhost":                       {Config{Label: "a", Bind: "localhost:7946", Query: "hub.test"}, nil},
		"everywhere, with a secret":       {Config{Label: "a", Bind: ":7946", Query: "hub.test", Secret: secret, Advertise: "hub-1:7946"}, nil},
		"everywhere, without one":         {Config{Label: "a", Bind: ":7946", Query: "hub.test"}, []string{"Secret"}},
		"written as an address":           {Config{Label: "a", Bind: "0.0.0.0:7946", Query: "hub.test"}, []string{"Secret"}},
		"another address, without":        {Config{Label: "a", Bind: "10.0.0.1:7946", Query: "hub.test"}, []string{"Secret"}},
		"neither peers nor query":         {Config{Label: "a", Bind: "127.0.0.1:1"}, []string{"Peers"}},
		"both":                            {Config{Label: "a", Bind: "127.0.0.1:1", Query: "x", Peers: []string{"x:1"}}, []string{"Peers"}},
		"a query without a port to go by": {Config{Label: "a", Bind: "127.0.0.1:0", Query: "x"}, []string{"Query"}},
		"everything": {Config{Label: "a b", NodeName: "ä", Bind: "hub:7946", Advertise: ":1", Peers: []string{"x", "x:0", "x:99999"}},
			[]string{"Label", "NodeName", "Bind", "Advertise", "Peers", "Peers", "Peers"}},
	} {
		var got []string
		for _, p := range test.c.Check() {
			got = append(got, p.Field)
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s: %v\n%s", name, test.c.Check(), diff)
		}
		if _, err := New(test.c); (err != nil) != (test.want != nil) {
			t.Errorf("%s: New: %v", name, err)
		}
	}
	if _, err := New(Config{Label: "a", Bind: ":1", Query: "x"}); !errors.Is(err, ErrSecretRequired) {
		t.Errorf("errors.Is does not find ErrSecretRequired in %v", err)
	}
}

// Whoever is told that a peer can't be heard, or is gone, is told when it can, or is back: all these lines are warnings.
func TestBothEndsOfALossAreWarnings(t *testing.T) {
	t.Parallel()
	n := &Node{}
	var err error
	if n.metrics, err = newMetrics(prometheus.NewRegistry(), n); err != nil {
		t.Fatal(err)
	}
	p := &peer{m: member{Name: "node2"}}
	if r := n.note(p, Visible, true); r.level != slog.LevelInfo || r.attrs != nil {
		t.Errorf("a new node: %+v", r)
	}
	again := &peer{m: member{Name: "node2"}} // as another process, or found again
	for _, step := range []struct {
		p        *peer
		standing Standing
		alive    bool
		outage   bool
	}{{p, Split, true, true}, {p, Visible, true, false}, {p, Split, true, true}, {p, Split, false, true}, {again, Visible, true, false}, {again, Visible, false, true}, {p, Visible, true, false}} {
		r := n.note(step.p, step.standing, step.alive)
		if diff := cmp.Diff([]any{slog.Bool("outage", step.outage)}, r.attrs, cmp.Comparer(slog.Attr.Equal)); r.level != slog.LevelWarn || diff != "" {
			t.Errorf("%s at %v: %s", r.text, r.level, diff)
		}
	}
}
