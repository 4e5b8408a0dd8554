package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"
)

const (
	// viewEvery is the pace at which standings are judged.
	viewEvery = 100 * time.Millisecond
	beatEvery = time.Second
	// beatTimeout is the most that one heartbeat may take, connecting included.
	beatTimeout = 2 * time.Second
	settleMax   = 3 * time.Second
	// goneFor is how long a member that left is remembered: what is still on its way must not bring it back.
	goneFor = 10 * time.Minute
	// The steps of leaving.
	flushTimeout = time.Second
	leaveTimeout = 500 * time.Millisecond
)

// Run opens the port, joins the cluster and stays in it until ctx ends; then it lets queued messages go out, leaves, and
// returns nil. It fails when the port can't be had or no address can be advertised; a database or peers that are away
// are no failure. It is called once.
func (n *Node) Run(ctx context.Context) error {
	defer n.settle()
	logger := newGossipLog(n.log, n.strangers)
	port, err := openTransport(n.bind, n.port, logger)
	if err != nil {
		return err
	}
	if err := n.introduce(ctx, port.port); err != nil {
		return errors.Join(err, port.Shutdown())
	}
	g, err := newGossip(n.config.Label, n.id, n.cred.gossip, n.hello, port, n.self, n.news, logger)
	if err != nil {
		return errors.Join(fmt.Errorf("cluster: start gossip: %w", err), port.Shutdown())
	}

	// Sessions outlive ctx: what is queued goes out first.
	talking, hangUp := context.WithCancel(context.Background())
	defer hangUp()
	var loops, sessions sync.WaitGroup
	n.mu.Lock()
	n.start = func(p *peer) {
		of, cancel := context.WithCancel(talking)
		p.cancel = cancel
		sessions.Go(func() { n.keep(of, p) })
	}
	n.mu.Unlock()
	n.started.Store(max(n.elapsed(), 1))
	server := n.newServer()
	loops.Go(func() { _ = server.Serve(port.listener()) }) // ends with the server
	n.log.Info("joining the cluster", slog.String("id", n.id.String()), slog.Any("address", n.self), slog.String("label", n.config.Label))

	var work sync.WaitGroup
	work.Go(func() { n.keeper(ctx) })
	work.Go(func() { n.heartbeat(ctx) })
	joining := joiner{n: n, gossip: g}
	work.Go(func() { joining.run(ctx) })
	work.Go(func() { n.settling(ctx) })
	<-ctx.Done()
	work.Wait()

	// Flush, say so, and go: to those that hear us by our own word, to the others by gossip and by the missing row.
	stopping, cancel := context.WithTimeout(context.Background(), flushTimeout)
	defer cancel()
	err = n.Flush(stopping)
	if err == nil {
		err = n.flush(stopping, true)
	}
	if err != nil {
		n.log.Warn("not everything that was counted reached the others", slog.Any("error", err))
	}
	n.mu.Lock()
	n.closing, n.start = true, nil
	n.mu.Unlock()
	if err := g.list.Leave(leaveTimeout); err != nil {
		n.log.Debug("gossip", slog.Any("error", err))
	}
	hangUp()
	sessions.Wait()
	graceful := time.AfterFunc(leaveTimeout, server.Stop) // cuts off whoever does not
	server.GracefulStop()                                 // the others hang up when they hear that we leave
	graceful.Stop()
	err = g.list.Shutdown()
	loops.Wait()
	joining.attempts.Wait()
	if err != nil {
		return fmt.Errorf("cluster: close the port: %w", err)
	}
	return nil
}

// introduce settles what this node tells of itself.
func (n *Node) introduce(ctx context.Context, port int) (err error) {
	n.here, err = localAddresses()
	if err != nil {
		return fmt.Errorf("cluster: list the addresses of this machine: %w", err)
	}
	switch {
	case n.config.Advertise != "":
		list, err := n.finder.resolve(ctx, n.config.Advertise)
		if err != nil {
			return fmt.Errorf("cluster: the advertised address: %w", err)
		}
		if len(list) == 0 {
			return fmt.Errorf("cluster: the advertised address %s has no address", n.config.Advertise)
		}
		n.self = list[0]
	case n.bind.IsValid():
		n.self = netip.AddrPortFrom(n.bind, uint16(port))
	default:
		list, _ := n.finder.find(ctx)
		var listed []netip.Addr
		for _, a := range list {
			listed = append(listed, a.Addr())
		}
		a, err := advertised(n.here, listed)
		if err != nil {
			return err
		}
		n.self = netip.AddrPortFrom(a, uint16(port))
	}
	n.bound = uint16(port)
	n.me = member{Name: n.config.NodeName, Address: n.self.String(), Version: n.config.Version, Started: time.Now().UnixMilli()}
	n.hello, err = n.me.encode()
	return err
}

// isOwn tells whether an address that discovery found is this node.
func (n *Node) isOwn(a netip.AddrPort) bool {
	return a == n.self || a.Port() == n.bound && (a.Addr() == n.bind || !n.bind.IsValid() && slices.Contains(n.here, a.Addr()))
}

func (n *Node) kick() {
	select {
	case n.kicked <- struct{}{}:
	default:
	}
}

// expect notes how many peers are listed.
func (n *Node) expect(others int, known bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.expected, n.known = others, known
}

// settling closes settled when the first round of joining and the first heartbeat are over and the peers found are
// connected, or three seconds have passed.
func (n *Node) settling(ctx context.Context) {
	defer n.settle()
	enough := time.NewTimer(settleMax)
	defer enough.Stop()
	for _, first := range []<-chan struct{}{n.firstRound, n.firstBeat} {
		select {
		case <-first:
		case <-enough.C:
			return
		case <-ctx.Done():
			return
		}
	}
	for {
		n.look() // what the first round brought must be in the view
		view, changed := n.Watch()
		if !slices.ContainsFunc(view.Peers, func(p Peer) bool { return p.Standing == Joining || !p.Connected }) {
			return
		}
		select {
		case <-changed:
		case <-enough.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// keeper keeps the roster and the view until ctx ends.
func (n *Node) keeper(ctx context.Context) {
	tick := time.NewTicker(viewEvery)
	defer tick.Stop()
	for {
		n.look()
		select {
		case <-ctx.Done():
			return
		case <-n.news.signal:
		case <-n.kicked:
		case <-tick.C:
		}
	}
}

// look takes the news in, judges every peer, publishes the view and logs what has changed.
func (n *Node) look() {
	for _, r := range n.judgeAll() {
		n.log.Log(context.Background(), r.level, r.text, r.attrs...)
	}
}

// remark is a line for the log: written when the roster's lock is given back, since writing may block.
type remark struct {
	level slog.Level
	text  string
	attrs []any
}

func (n *Node) judgeAll() (remarks []remark) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, t := range n.news.take() {
		if _, left := n.gone[t.id]; left || t.id == n.id {
			continue
		}
		p := n.roster[t.id]
		if p == nil && !t.alive {
			continue
		}
		if p == nil {
			p = n.add(t.id)
		}
		if p.gossip = t.alive; t.alive {
			p.m = t.m
		}
	}
	for id, t := range n.gone {
		if time.Since(t) > goneFor {
			delete(n.gone, id)
		}
	}
	w := n.witness(time.Now())
	settled := false
	select {
	case <-n.settled:
		settled = true
	default:
	}
	for id, b := range n.beats {
		if _, left := n.gone[id]; n.roster[id] == nil && !left && b.age < staleAfter {
			n.add(id).m = b.m
		}
	}
	v := &View{Visible: 1, Alive: 1, Witness: w == witnessRecent || w == witnessSteady, Skew: time.Duration(n.skew.Load())}
	living := []member{n.me}
	for id, p := range n.roster {
		p.row = rowNone
		if b, ok := n.beats[id]; ok {
			p.label = b.label
			if p.row = rowStale; b.age < staleAfter {
				p.row = rowFresh
			}
		}
		s := sighting{heard: n.since(p), row: p.row, gossip: p.gossip, replaced: p.replaced.Load()}
		standing, alive := judge(s, w)
		switch {
		case p.leaving:
			alive = false
		case standing == Split && s.heard < 0 && !settled:
			standing = Joining // we are: there was no time to hear it yet
		}
		if r := n.note(p, standing, alive); r.text != "" {
			r.attrs = append(r.attrs, slog.String("peer", id.String()), slog.String("name", p.m.Name), slog.String("address", p.m.Address))
			remarks = append(remarks, r)
		}
		if !alive && (!p.gossip || p.leaving) {
			n.remove(p)
			continue
		}
		if p.cancel == nil && p.m.Address != "" && n.start != nil && !n.isForeign(p) {
			n.start(p)
		}
		if !alive {
			continue
		}
		living = append(living, p.m)
		switch standing {
		case Visible:
			v.Visible++
			v.Alive++
		case Split:
			v.Alive++
		}
		v.Peers = append(v.Peers, Peer{
			ID: id, Name: p.m.Name, Address: p.m.Address, Version: p.m.Version, Started: p.m.started(), Standing: standing,
			Starting: p.starting.Load(), Heard: s.heard, Latency: time.Duration(p.latency.Load()), Skew: time.Duration(p.skew.Load()),
			Session: p.session.Load(), Connected: p.link.Load() != nil, Queued: len(p.queue), Dropped: p.dropped.Load(),
		})
	}
	v.Dead = n.dead(living)
	slices.SortFunc(v.Peers, func(a, b Peer) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	old := n.seen.Load()
	changed := old.view.Witness != v.Witness || !slices.EqualFunc(old.view.Peers, v.Peers, func(a, b Peer) bool {
		return a.ID == b.ID && a.Standing == b.Standing && a.Session == b.Session && a.Connected == b.Connected && a.Starting == b.Starting
	})
	if !changed {
		n.seen.Store(&published{v, old.changed})
		return remarks
	}
	n.seen.Store(&published{v, make(chan struct{})})
	close(old.changed)
	return remarks
}

// add puts a peer on the roster, whose lock is held.
func (n *Node) add(id ID) *peer {
	p := &peer{id: id, queue: make(chan outgoing, queueLen), wake: make(chan struct{}, 1)}
	p.starting.Store(true) // until it says that it is not
	n.roster[id] = p
	peers := maps.Clone(n.roster)
	n.peers.Store(&peers)
	return p
}

// remove takes a peer off the roster, whose lock is held.
func (n *Node) remove(p *peer) {
	if p.cancel != nil {
		p.cancel()
	}
	p.removed.Store(true)
	delete(n.roster, p.id)
	peers := maps.Clone(n.roster)
	n.peers.Store(&peers)
}

// maxLost bounds the names of nodes that are gone: many never come back under the name that they had.
const maxLost = 256

// note counts what became of a peer, and gives the words for it, if it is worth any.
func (n *Node) note(p *peer, standing Standing, alive bool) (r remark) {
	switch was, now := p.listed && p.standing != Joining, alive && standing != Joining; {
	case !was && now && standing == Visible:
		n.metrics.arrivals.Inc()
		r = remark{level: slog.LevelInfo, text: "a node has joined the cluster"}
		if _, lost := n.lost[p.m.Name]; lost { // whoever was told that it is gone is told that it is back
			delete(n.lost, p.m.Name)
			r = remark{slog.LevelWarn, "a node that was gone is back", []any{slog.Bool("outage", false)}}
		}
	case now && standing == Split && !was && n.isForeign(p):
		r = remark{level: slog.LevelWarn, text: "a node of another cluster uses this database: limits are shared out with it (CLUSTER_LABEL " + p.label + ")"}
	case now && standing == Split && (!was || p.standing != Split):
		n.metrics.splits.Inc()
		r = remark{slog.LevelWarn, "a node that lives can't be heard: limits are shared out", []any{slog.Bool("outage", true)}}
	case was && now && standing == Visible && p.standing == Split:
		r = remark{slog.LevelWarn, "a node can be heard again", []any{slog.Bool("outage", false)}}
	case was && !now && p.leaving:
		n.metrics.left.Inc()
		r = remark{level: slog.LevelInfo, text: "a node has left the cluster"}
	case was && !now:
		n.metrics.died.Inc()
		r = remark{slog.LevelWarn, "a node is gone", []any{slog.Bool("outage", true)}}
		if len(n.lost) >= maxLost || n.lost == nil {
			n.lost = map[string]struct{}{}
		}
		n.lost[p.m.Name] = struct{}{}
	}
	p.standing, p.listed = standing, alive
	return r
}

// admit finds or makes the peer that has opened a stream to us; nil if it said before that it leaves.
func (n *Node) admit(id ID, m member) *peer {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, left := n.gone[id]; left || n.closing || id == n.id {
		return nil
	}
	p := n.roster[id]
	if p == nil {
		p = n.add(id)
	}
	if p.m.Address == "" {
		p.m = m
	}
	p.heard.Store(n.elapsed()) // before the roster's lock is given back, or it might be taken for dead
	p.session.Add(1)
	select {
	case p.wake <- struct{}{}:
	default:
	}
	n.kick()
	return p
}

// left notes that a member said that it leaves.
func (n *Node) left(p *peer) {
	n.mu.Lock()
	p.leaving = true
	n.gone[p.id] = time.Now()
	n.mu.Unlock()
	n.kick()
}

// hear notes a frame of a peer.
func (n *Node) hear(p *peer) {
	now := n.elapsed()
	if before := p.heard.Swap(now); now-before > int64(visibleFor) {
		n.kick()
	}
}

// since is how long ago a peer was heard, -1 for never.
func (n *Node) since(p *peer) time.Duration {
	at := p.heard.Load()
	if at == 0 {
		return -1
	}
	return time.Duration(max(n.elapsed()-at, 0))
}

func (n *Node) addressOf(p *peer) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return p.m.Address
}

// witness tells how far the database's word can be taken. The roster's lock is held.
func (n *Node) witness(now time.Time) witness {
	switch {
	case n.config.Database == nil:
		return noWitness
	case n.beatAt.IsZero() || now.Sub(n.beatAt) > staleAfter:
		return witnessGone
	case now.Sub(n.steady) < staleAfter:
		return witnessRecent
	}
	return witnessSteady
}

// dead are those of this cluster whose row is stale and was not taken away. The roster's lock is held.
func (n *Node) dead(living []member) []Dead {
	var stale []beat
	for id, b := range n.beats {
		p := n.roster[id]
		if _, left := n.gone[id]; left || p != nil && p.listed || b.age < staleAfter || b.label != n.config.Label {
			continue
		}
		b.age += time.Since(n.beatAt) // since it was read
		stale = append(stale, b)
	}
	return missed(stale, living, time.Unix(0, n.Now()))
}

// freshRows counts the other nodes of this cluster that write heartbeats. The roster's lock is held.
func (n *Node) freshRows() int {
	count := 0
	for _, b := range n.beats {
		if b.age < staleAfter && b.label == n.config.Label {
			count++
		}
	}
	return count
}
