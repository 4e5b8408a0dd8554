package proofs

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
)

// wire joins the nodes of a test. A message arrives at once, or never.
type wire struct {
	mu      sync.Mutex
	nodes   []*node
	cut     bool
	changed chan struct{}
	session uint64
	sent    int // messages, to however many
	bytes   int
}

type node struct {
	*Proofs
	wire *wire
	id   cluster.ID
	old  bool // a program that does not know the topic
}

func newWire() *wire { return &wire{changed: make(chan struct{}), session: 1} }

func (w *wire) join() *node {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := &node{wire: w, id: cluster.ID(len(w.nodes) + 1)}
	n.Proofs = New(n, slog.New(slog.DiscardHandler))
	w.nodes = append(w.nodes, n)
	w.news()
	return n
}

func (w *wire) news() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// setCut parts the nodes, or makes their connections anew.
func (w *wire) setCut(cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cut = cut; !cut {
		w.session++
	}
	w.news()
}

func (n *node) Watch() (*cluster.View, <-chan struct{}) {
	n.wire.mu.Lock()
	defer n.wire.mu.Unlock()
	v := &cluster.View{}
	for _, other := range n.wire.nodes {
		if other != n {
			standing := cluster.Visible
			if n.wire.cut {
				standing = cluster.Split
			}
			v.Peers = append(v.Peers, cluster.Peer{ID: other.id, Standing: standing, Session: n.wire.session})
		}
	}
	return v, n.wire.changed
}

func (n *node) Broadcast(t cluster.Topic, body []byte) (to int) {
	n.wire.mu.Lock()
	defer n.wire.mu.Unlock()
	n.wire.sent++
	n.wire.bytes += len(body)
	for _, other := range n.wire.nodes {
		if other != n && !n.wire.cut && !other.old {
			other.Handler().Receive(n.id, cluster.Message{Body: append([]byte(nil), body...)})
			to++
		}
	}
	return to
}

func (n *node) Fetch(ctx context.Context, from cluster.ID, t cluster.Topic, each func([]byte) error) error {
	n.wire.mu.Lock()
	other, cut := n.wire.nodes[from-1], n.wire.cut
	n.wire.mu.Unlock()
	switch {
	case t != Topic:
		return errors.New("another topic")
	case cut:
		return cluster.ErrUnreachable
	case other.old:
		return cluster.ErrRefused
	}
	return other.Handler().State(ctx, n.id, each)
}

// run runs the nodes until the test's function ends.
func (w *wire) run(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for _, n := range w.nodes {
		all.Go(func() {
			if err := n.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	synctest.Wait() // they have asked each other: what comes now is told
	t.Cleanup(func() {
		stop()
		all.Wait()
	})
}

func key(i int) ratelimit.Key { return ratelimit.Key{Hi: 7, Lo: uint64(i)} }

// known counts the nodes that know a proof.
func (w *wire) known(k ratelimit.Key) (n int) {
	for _, x := range w.nodes {
		if x.Has(k, time.Now()) {
			n++
		}
	}
	return n
}

// A proof that was given at one node counts at all of them, for an hour from then.
func TestProofsTravel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWire()
		nodes := []*node{w.join(), w.join(), w.join()}
		w.run(t)
		nodes[0].Add(key(1), time.Now())
		time.Sleep(2 * gather)
		if n := w.known(key(1)); n != 3 || w.known(key(2)) != 0 {
			t.Errorf("%d of 3 nodes know the proof", n)
		}
		time.Sleep(Life - 2*time.Second)
		if n := w.known(key(1)); n != 3 {
			t.Errorf("after less than an hour %d of 3", n)
		}
		time.Sleep(2 * time.Second)
		if n := w.known(key(1)); n != 0 {
			t.Errorf("after an hour %d still", n)
		}
	})
}

// A provider that posts all the time, to one node or another, costs a message in five minutes, and is known everywhere all
// the time; so do many of them together.
func TestProofsAreToldSeldom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWire()
		w.join()
		w.join()
		w.run(t)
		const providers, hours = 100, 3
		for i := range hours * 3600 {
			for k := range providers {
				w.nodes[(i+k)%2].Add(key(k), time.Now())
			}
			time.Sleep(time.Second)
			if n := w.known(key(i % providers)); n != 2 {
				t.Fatalf("after %d s %d of 2 nodes know a provider", i, n)
			}
		}
		// Renewals drift apart by the second: how many share a message is not promised.
		if most := providers * (hours*12 + 1); w.sent > most || w.bytes > most*(1+proofBytes) {
			t.Errorf("%d messages of %d bytes in %d hours of %d providers", w.sent, w.bytes, hours, providers)
		}
	})
}

// A node that joins knows all proofs before it takes requests, however many, and from nodes of an older program none.
func TestJoiningNodeAsks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWire()
		a, old := w.join(), w.join()
		old.old = true
		const many = 3 * numShards * pieceProofs / 2
		for i := range many {
			a.Add(key(i), time.Now())
		}
		time.Sleep(10 * time.Minute)
		c := w.join()
		if err := c.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i := range many {
			if !c.Has(key(i), time.Now()) {
				t.Fatalf("proof %d is not known", i)
			}
		}
		time.Sleep(Life - 10*time.Minute)
		if c.Has(key(0), time.Now()) {
			t.Error("a proof that was asked for counts longer than where it was given")
		}
		if err := a.tellAll(func(piece []byte) error {
			t.Errorf("%d bytes of proofs that are over travel", len(piece))
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
}

// What was lost while nodes were parted is known once they are connected again.
func TestProofsAfterASplit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWire()
		a, b := w.join(), w.join()
		w.run(t)
		w.setCut(true)
		a.Add(key(1), time.Now())
		b.Add(key(2), time.Now())
		time.Sleep(time.Minute)
		if w.known(key(1)) != 1 || w.known(key(2)) != 1 {
			t.Fatal("the nodes are not parted")
		}
		w.setCut(false)
		synctest.Wait()
		if w.known(key(1)) != 2 || w.known(key(2)) != 2 {
			t.Error("what was lost stays so")
		}
	})
}

// A node that stops tells first what it has heard last.
func TestStopTells(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWire()
		a, b := w.join(), w.join()
		ctx, stop := context.WithCancel(t.Context())
		stopped := make(chan error)
		go func() { stopped <- a.Run(ctx) }()
		synctest.Wait()
		a.Add(key(1), time.Now())
		a.Add(key(2), time.Now())
		stop()
		if err := <-stopped; err != nil || !b.Has(key(1), time.Now()) || !b.Has(key(2), time.Now()) {
			t.Errorf("the last proofs are lost (%v)", err)
		}
	})
}

// A request waits for nothing: when nobody sends, what there is no room for is told with its renewal.
func TestAddNeverWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWire()
		a, b := w.join(), w.join()
		for i := range maxFresh + 10 {
			a.Add(key(i), time.Now())
		}
		w.run(t)
		time.Sleep(renewEvery + time.Second)
		last := key(maxFresh + 9)
		if !b.Has(key(0), time.Now()) {
			t.Fatal("nothing was told")
		}
		a.Add(last, time.Now())
		time.Sleep(2 * gather)
		if !b.Has(last, time.Now()) {
			t.Error("what found no room is never told")
		}
	})
}

func TestProofsAreBounded(t *testing.T) {
	t.Parallel()
	p, now := New(nil, slog.New(slog.DiscardHandler)), time.Now()
	for i := range Max + 10_000 {
		p.Add(key(i), now)
	}
	var all []byte
	for i := Max + 10_000; i < 2*Max; i++ {
		all = appendProof(all, key(i), 3000)
	}
	if err := p.merge(all, now); err != nil {
		t.Fatal(err)
	}
	held := 0
	for i := range p.shards {
		held += len(p.shards[i].proofs)
	}
	if held > Max || held < Max/2 {
		t.Errorf("%d proofs held, the bound is %d", held, Max)
	}
	if !p.Has(key(2*Max-1), now) {
		t.Error("the newest is forgotten")
	}
}

// The laws of merging, whatever comes and in whatever order: a proof counts as long as the longest word on it says, and
// never for more than an hour.
func FuzzMerge(f *testing.F) {
	f.Add(appendProof(nil, key(1), 3600), appendProof(appendProof(nil, key(1), 5), key(2), 65535))
	f.Add([]byte{}, []byte{2})
	f.Add(appendProof(nil, key(1), 0), []byte{wireVersion})
	f.Fuzz(func(t *testing.T, x, y []byte) {
		began := time.Now()
		merged := func(words ...[]byte) map[ratelimit.Key]proof {
			p, all := New(nil, slog.New(slog.DiscardHandler)), map[ratelimit.Key]proof{}
			p.began = began
			for _, b := range words {
				if err := p.merge(b, began); (err == nil) != (len(b)%proofBytes == 1 && b[0] == wireVersion) {
					t.Fatalf("%x: %v", b, err)
				}
			}
			for i := range p.shards {
				for k, x := range p.shards[i].proofs {
					if all[k] = x; x.until < 0 || x.until > seconds(Life) {
						t.Fatalf("%v counts for %d s", k, x.until)
					}
				}
			}
			return all
		}
		once := merged(x, y)
		for _, again := range []map[ratelimit.Key]proof{merged(y, x), merged(x, y, x), merged(y, y, x)} {
			if len(again) != len(once) {
				t.Fatalf("%v and %v", once, again)
			}
			for k, v := range once {
				if again[k] != v {
					t.Fatalf("%v: %v and %v", k, v, again[k])
				}
			}
		}
	})
}

// The check is on the way of each webhook.
func TestHasAllocatesNothing(t *testing.T) {
	p, now := New(nil, slog.New(slog.DiscardHandler)), time.Now()
	p.Add(key(1), now)
	if n := testing.AllocsPerRun(100, func() {
		p.Add(key(1), now)
		_ = p.Has(key(1), now) && p.Has(key(2), now)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A proof is remembered before it is told, whoever tells it at once.
func TestNoProofIsToldBeforeItIsKept(t *testing.T) {
	t.Parallel()
	w := newWire()
	a, b := w.join(), w.join()
	ctx, stop := context.WithCancel(t.Context())
	var loops, callers sync.WaitGroup
	loops.Go(func() { _ = a.Run(ctx) })
	const each, by = 5000, 8
	for g := range by {
		callers.Go(func() {
			for i := range each {
				for len(a.fresh) > 16 {
					runtime.Gosched()
				}
				a.Add(key(g*each+i), time.Now())
			}
		})
	}
	callers.Wait()
	stop()
	loops.Wait()
	for i := range each * by {
		if !b.Has(key(i), time.Now()) {
			t.Fatalf("proof %d was told before it was kept", i)
		}
	}
}
