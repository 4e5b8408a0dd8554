package cluster

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
)

// Errors of calls. A call that was on its way when it failed may have been answered all the same: repeat only what is
// harmless to repeat.
var (
	// ErrUnreachable: there is no connection to the member, or it broke.
	ErrUnreachable = errors.New("cluster: member unreachable")
	// ErrRefused: the member has no such topic, or its handler returned an error, whose text is in the message.
	ErrRefused = errors.New("cluster: member refused")
	// ErrSecretRequired: a node that other machines can reach needs a secret.
	ErrSecretRequired = errors.New("required, since other machines reach this node")
)

// MaxMessage is the most bytes of a message, a call's request or answer, or a piece of state.
const MaxMessage = 1 << 20

// Topic tells the users of one node's connections apart. Both sides must mean the same by it; a topic is never reused for
// another format.
type Topic byte

// Handler receives what members send on a topic. Nil members are not offered. From is proven: the other side holds the
// secret and the identity.
type Handler struct {
	// Receive takes a message. One member's messages come one at a time, in the order of sending, each at most once, some
	// perhaps never; those of different members come side by side. body belongs to the callee. It must not block: it
	// delays all later messages of that member, and its being heard.
	Receive func(from ID, m Message)
	// Answer answers a call. ctx ends at the caller's deadline or when it gives up. Calls come side by side.
	Answer func(ctx context.Context, from ID, request []byte) ([]byte, error)
	// State passes what a joining member needs to send, piece by piece, each at most MaxMessage bytes and not changed
	// afterwards. send's error is to be returned: the asker is gone.
	State func(ctx context.Context, from ID, send func(piece []byte) error) error
}

// Message is one message of a member's stream.
type Message struct {
	Body []byte
	// Sent is the sender's corrected clock when it was handed over for sending, in Unix nanoseconds. Beside Node.Now it
	// tells the delay, as exactly as the clocks agree.
	Sent int64
}

// Resolver looks names up; [net.DefaultResolver] is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Config of a node. One of Peers and Query is needed.
type Config struct {
	// Label names the cluster, 1 to 64 letters, digits, '.', '_' or '-'. Nodes of another label are refused.
	Label string
	// NodeName is the operator's word for this node, at most 64 bytes.
	NodeName string
	// Version of the program, for operators.
	Version string
	// Secret is known to the members and nobody else. It may be empty if Bind is a loopback address.
	Secret []byte
	// OtherSecret, if there is one, is accepted as well as Secret, so that a secret can be changed without a split: all nodes
	// accept the new one first, then use it, then forget the old one.
	OtherSecret []byte
	// Bind is the host:port to listen on, TCP and UDP. An empty host is all addresses, port 0 any free one.
	Bind string
	// Advertise is the host:port at which the others reach this node; empty: found from Bind and the interfaces.
	Advertise string
	// Peers lists host:port of members. Some may be down, this node may be among them.
	Peers []string
	// Query is a DNS name whose A and AAAA records are the members, "name" or "name:port"; the default port is Bind's.
	Query string
	// Resolver looks up Query and the hosts of Peers; nil: net.DefaultResolver.
	Resolver Resolver
	// Starting makes the node say that it does not take requests yet, until Open. The others show it as Peer.Starting, and
	// give it nothing to decide that it would have to know the past of.
	Starting bool
	// Database takes the heartbeats. It should be a pool of the node's own: a heartbeat must not wait for requests. nil:
	// no witness; gossip alone tells who lives, and the clock is not corrected. For tests.
	Database *pgxpool.Pool
	// Now is the clock that is corrected, in Unix nanoseconds. It must not step. nil: the wall clock at New, and
	// monotonic time since.
	Now func() int64
	// Dial opens connections to members; nil: TCP with keep-alive probes. Tests cut them, or make them slow.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Registerer receives the metrics; nil: none.
	Registerer prometheus.Registerer
	// Logger; nil: slog.Default.
	Logger *slog.Logger
}

// Node is this member. All methods are safe for concurrent use.
type Node struct {
	id         ID
	config     Config
	bind       netip.Addr // invalid: all addresses
	port       int        // as configured
	cred       credential
	log        *slog.Logger
	metrics    *metrics
	strangers  *strangers
	local      func() int64 // Config.Now
	shift      int64        // local less the wall clock, at New
	finder     *finder
	handlers   [256]Handler
	news       *news
	kicked     chan struct{} // the keeper should look now
	settled    chan struct{}
	settle     func()
	firstRound chan struct{} // of joining, over
	firstBeat  chan struct{} // over, whatever came of it

	// Set by Run before anything else reads them.
	self  netip.AddrPort // as advertised
	bound uint16         // the port
	here  []netip.Addr   // this machine's
	me    member
	hello []byte // me, encoded

	closed  atomic.Bool  // until Open
	offset  atomic.Int64 // ns; Offset
	skew    atomic.Int64 // ns; of the wall clock against the corrected one
	started atomic.Int64 // elapsed at Run, 0 before
	epoch   time.Time    // elapsed is measured from it
	peers   atomic.Pointer[map[ID]*peer]
	seen    atomic.Pointer[published]

	mu       sync.Mutex
	roster   map[ID]*peer // behind peers, which is its copy
	gone     map[ID]time.Time
	lost     map[string]struct{} // names of nodes that went without a word and are not back
	beats    map[ID]beat
	beatAt   time.Time // of the last good heartbeat
	steady   time.Time // since when they have been good
	expected int       // listed peers
	known    bool      // the list was had at least once
	closing  bool
	start    func(p *peer) // begins its session loop; nil unless running
}

// published is a view and the channel that tells of the next change.
type published struct {
	view    *View
	changed chan struct{}
}

var (
	labelForm = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)
	nameForm  = regexp.MustCompile(`^[A-Za-z0-9._-]{0,64}$`)
)

// FieldError is one thing that is wrong with a field of a Config.
type FieldError struct {
	Field string // its name in Config
	Err   error
}

// Error implements error.
func (e *FieldError) Error() string { return fmt.Sprintf("cluster: %s: %v", e.Field, e.Err) }

// Unwrap gives the cause.
func (e *FieldError) Unwrap() error { return e.Err }

// Check tells all that is wrong with a configuration, without the world's help.
func (c Config) Check() []*FieldError {
	var all []*FieldError
	add := func(field, format string, args ...any) {
		all = append(all, &FieldError{field, fmt.Errorf(format, args...)})
	}
	if !labelForm.MatchString(c.Label) {
		add("Label", "%q is not 1 to 64 letters, digits, '.', '_' or '-'", c.Label)
	}
	if !nameForm.MatchString(c.NodeName) {
		add("NodeName", "%q is not at most 64 letters, digits, '.', '_' or '-'", c.NodeName)
	}
	host, _, err := c.bind()
	switch {
	case err != nil:
		add("Bind", "%w", err)
	case len(c.Secret) == 0 && !host.IsLoopback():
		add("Secret", "%w", ErrSecretRequired)
	}
	if len(c.OtherSecret) > 0 && (len(c.Secret) == 0 || bytes.Equal(c.Secret, c.OtherSecret)) {
		add("OtherSecret", "is of use beside another secret only")
	}
	if c.Advertise != "" {
		if h, port, err := parseEndpoint(c.Advertise); err != nil || h == "" || port == 0 {
			add("Advertise", "%q is no host:port", c.Advertise)
		}
	}
	if (len(c.Peers) == 0) == (c.Query == "") {
		add("Peers", "one of a list of peers and a DNS name is needed")
	}
	for _, p := range c.Peers {
		if h, port, err := parseEndpoint(p); err != nil || h == "" || port == 0 {
			add("Peers", "%q is no host:port", p)
		}
	}
	if c.Query != "" {
		if h, port, err := parseEndpoint(c.query()); err != nil || h == "" || port == 0 {
			add("Query", "%q is neither a name nor name:port, or the port to bind is any free one", c.Query)
		}
	}
	return all
}

// bind reads Bind; the address is invalid for all addresses.
func (c Config) bind() (netip.Addr, int, error) {
	host, port, err := parseEndpoint(c.Bind)
	if err != nil {
		return netip.Addr{}, 0, err
	}
	switch host {
	case "":
		return netip.Addr{}, port, nil
	case "localhost":
		return netip.AddrFrom4([4]byte{127, 0, 0, 1}), port, nil
	}
	a, err := netip.ParseAddr(host)
	if err != nil {
		return netip.Addr{}, 0, fmt.Errorf("%q is no IP address with a port", c.Bind)
	}
	if a.IsUnspecified() {
		return netip.Addr{}, port, nil
	}
	return a.Unmap(), port, nil
}

// query is Query with a port, Bind's unless it has its own.
func (c Config) query() string {
	if c.Query == "" || hasPort(c.Query) {
		return c.Query
	}
	_, port, _ := c.bind() // its error is told elsewhere
	return net.JoinHostPort(c.Query, strconv.Itoa(port))
}

// New makes a node. It starts nothing and opens nothing. Its error joins those of Config.Check.
func New(c Config) (*Node, error) {
	if problems := c.Check(); len(problems) > 0 {
		all := make([]error, len(problems))
		for i, p := range problems {
			all[i] = p
		}
		return nil, errors.Join(all...)
	}
	if c.Resolver == nil {
		c.Resolver = net.DefaultResolver
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	epoch := time.Now()
	if c.Now == nil {
		c.Now = func() int64 { return epoch.UnixNano() + int64(time.Since(epoch)) }
	}
	c.Version = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' || strings.ContainsRune(`"\<>&`, r) {
			return '_'
		}
		return r
	}, c.Version)
	c.Version = c.Version[:min(len(c.Version), maxVersion)]
	n := &Node{
		id: newID(), config: c, log: c.Logger, local: c.Now, epoch: epoch, news: newNews(), kicked: make(chan struct{}, 1),
		settled: make(chan struct{}), firstRound: make(chan struct{}), firstBeat: make(chan struct{}),
		roster: map[ID]*peer{}, gone: map[ID]time.Time{}, beats: map[ID]beat{},
	}
	n.closed.Store(c.Starting)
	n.settle = sync.OnceFunc(func() { close(n.settled) })
	n.bind, n.port, _ = c.bind() // checked
	n.shift = n.local() - time.Now().UnixNano()
	n.finder = &finder{resolver: c.Resolver, query: c.query(), peers: c.Peers, log: c.Logger}
	var err error
	if n.cred, err = newCredential(c.Label, c.Secret, c.OtherSecret, n.id); err != nil {
		return nil, err
	}
	n.strangers = &strangers{log: n.log, count: func() { n.metrics.refused.Inc() }}
	n.peers.Store(&map[ID]*peer{})
	n.seen.Store(&published{&View{Visible: 1, Alive: 1}, make(chan struct{})})
	if n.metrics, err = newMetrics(c.Registerer, n); err != nil {
		return nil, err
	}
	return n, nil
}

// Handle registers the handler of a topic. It must be called before Run, once for a topic.
func (n *Node) Handle(t Topic, h Handler) { n.handlers[t] = h }

// ID is this start's identity.
func (n *Node) ID() ID { return n.id }

// View is the cluster as seen now, at most 100 ms old. It costs one atomic read.
func (n *Node) View() *View { return n.seen.Load().view }

// Watch is View, with a channel that is closed when Peers, a Standing, Starting, a Session, Connected or Witness changes. Plain
// ageing and measuring close nothing.
func (n *Node) Watch() (*View, <-chan struct{}) {
	s := n.seen.Load()
	return s.view, s.changed
}

// Settled is closed once the first attempt to join is over: peers are connected, or none answered. Before it nothing is
// known; a node should not take requests. It takes at most 3 s from the start of Run. From then on the node's heartbeat
// tells the others that it admits requests.
func (n *Node) Settled() <-chan struct{} { return n.settled }

// Open ends Config.Starting, and tells the others at once.
func (n *Node) Open() {
	n.closed.Store(false)
	for _, p := range *n.peers.Load() {
		if p.link.Load() == nil {
			continue // the first ping will say so
		}
		select {
		case p.queue <- outgoing{kind: framePing}:
		default: // the next ping will
		}
	}
}

// Send queues a message for a member and reports whether it did; it never blocks. Messages are dropped, and counted, when
// the member is not connected or its queue is full, and those still queued when a connection breaks. body must not be
// changed afterwards, and has at most MaxMessage bytes.
func (n *Node) Send(to ID, t Topic, body []byte) bool {
	p := (*n.peers.Load())[to]
	return p != nil && n.enqueue(p, outgoing{kind: frameMessage, topic: t, sent: n.Now(), body: body})
}

// Broadcast is Send to every peer; it returns to how many.
func (n *Node) Broadcast(t Topic, body []byte) int {
	o := outgoing{kind: frameMessage, topic: t, sent: n.Now(), body: body}
	sent := 0
	for _, p := range *n.peers.Load() {
		if n.enqueue(p, o) {
			sent++
		}
	}
	return sent
}

func (n *Node) enqueue(p *peer, o outgoing) bool {
	why := dropQueueFull
	switch size := int64(len(o.body)); {
	case size > MaxMessage:
		why = dropTooLarge
	case p.link.Load() == nil:
		why = dropDisconnected
	case p.waits.Add(size) <= queueBytes:
		select {
		case p.queue <- o:
			n.metrics.messages.Inc()
			return true
		default:
		}
		fallthrough
	default:
		p.waits.Add(-size)
	}
	p.dropped.Add(1)
	n.metrics.dropped[why].Inc()
	return false
}

// Flush returns nil once the messages queued before it have been handled by their receivers, or those receivers were
// lost; or the error of ctx.
func (n *Node) Flush(ctx context.Context) error { return n.flush(ctx, false) }

// flush waits for the answer to a ping behind everything that is queued, and behind the word of leaving if that is asked.
func (n *Node) flush(ctx context.Context, leave bool) error {
	type waiter struct {
		p       *peer
		link    any
		flushed chan struct{}
	}
	var waiters []waiter
	for _, p := range *n.peers.Load() {
		link := p.link.Load()
		if link == nil {
			continue
		}
		w := waiter{p, link, make(chan struct{})}
		frames := []outgoing{{kind: framePing, flushed: w.flushed}}
		if leave {
			frames = []outgoing{{kind: frameLeave}} // it is the last: the receiver ends the stream
		}
		for _, o := range frames {
			select {
			case p.queue <- o:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		waiters = append(waiters, w)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for _, w := range waiters {
		for lost := false; !lost; {
			select {
			case <-w.flushed:
				lost = true
			case <-tick.C:
				lost = any(w.p.link.Load()) != w.link
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	return nil
}

// Call asks a member and waits for the answer. ctx needs a deadline. Errors are ErrUnreachable (at once if there is no
// connection), ErrRefused and those of ctx.
func (n *Node) Call(ctx context.Context, to ID, t Topic, request []byte) ([]byte, error) {
	answer, err := n.call(ctx, to, t, request)
	n.metrics.call(err)
	return answer, err
}

func (n *Node) call(ctx context.Context, to ID, t Topic, request []byte) ([]byte, error) {
	if _, ok := ctx.Deadline(); !ok {
		return nil, errors.New("cluster: a call without a deadline")
	}
	if len(request) > MaxMessage {
		return nil, fmt.Errorf("cluster: a call of %d bytes", len(request))
	}
	p := (*n.peers.Load())[to]
	if p == nil {
		return nil, ErrUnreachable
	}
	cc := p.link.Load()
	if cc == nil {
		return nil, ErrUnreachable
	}
	var answer []byte
	err := cc.Invoke(ctx, methodCall, packet{[]byte{byte(t)}, request}, &answer)
	return answer, localError(ctx, err)
}

// Fetch asks a member for its state and passes it on piece by piece; each owns its piece. Errors are as of Call, and each's.
func (n *Node) Fetch(ctx context.Context, from ID, t Topic, each func(piece []byte) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p := (*n.peers.Load())[from]
	if p == nil {
		return ErrUnreachable
	}
	cc := p.link.Load()
	if cc == nil {
		return ErrUnreachable
	}
	stream, err := cc.NewStream(ctx, &stateDesc, methodState)
	if err != nil {
		return localError(ctx, err)
	}
	if err := stream.SendMsg(packet{head: []byte{byte(t)}}); err != nil && !errors.Is(err, io.EOF) { // EOF: RecvMsg tells why
		return localError(ctx, err)
	}
	if err := stream.CloseSend(); err != nil {
		return localError(ctx, err)
	}
	for {
		var piece []byte
		switch err := stream.RecvMsg(&piece); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return localError(ctx, err)
		}
		if err := each(piece); err != nil {
			return err
		}
	}
}

// Offset is what must be added to the clock of Config.Now to have the cluster's: the database's while it can be reached,
// else the median of the members' clocks. One atomic read. It changes by microseconds while clocks agree, and by more when
// the database's clock steps.
func (n *Node) Offset() time.Duration { return time.Duration(n.offset.Load()) }

// Now is the corrected clock, in Unix nanoseconds.
func (n *Node) Now() int64 { return n.local() + n.offset.Load() }

// patience is how long a node that misses its peers is unready. Longer would make an outage of a blocked port.
const patience = 10 * time.Second

// Ready is nil, or why the node should not take traffic yet: it is just starting, or it expects peers, sees none, and has
// been running for less than ten seconds.
func (n *Node) Ready() error {
	since := n.started.Load()
	if since == 0 {
		return errors.New("the cluster is not joined yet")
	}
	if n.elapsed()-since >= int64(patience) {
		return nil
	}
	select {
	case <-n.settled:
	default:
		return errors.New("joining the cluster")
	}
	return n.lonely()
}

// lonely is an error when peers are expected and none is seen.
func (n *Node) lonely() error {
	if n.View().Visible > 1 {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	switch fresh := n.freshRows(); {
	case !n.known:
		return errors.New("expected peers: none seen, and looking them up fails")
	case n.expected > 0:
		return fmt.Errorf("expected peers: none seen of %d listed (is the port open for TCP and UDP, are CLUSTER_SECRET and CLUSTER_LABEL the same?)", n.expected)
	case fresh > 0:
		return fmt.Errorf("expected peers: none seen, but %d write heartbeats to the database", fresh)
	}
	return nil
}

// countUnreachable counts the peers that are heard and can't be spoken to.
func (n *Node) countUnreachable() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	count := 0
	for _, p := range n.roster {
		if p.listed && p.standing == Visible && n.unreachable(p) {
			count++
		}
	}
	return count
}

// foreigners counts the living nodes of other clusters that share the database, and names those clusters.
func (n *Node) foreigners() (labels []string, count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, p := range n.roster {
		if p.listed && n.isForeign(p) {
			count++
			labels = append(labels, p.label)
		}
	}
	slices.Sort(labels)
	return slices.Compact(labels), count
}

// isForeign tells whether a peer wrote a heartbeat for another cluster. The roster's lock is held.
func (n *Node) isForeign(p *peer) bool { return p.label != "" && p.label != n.config.Label }

const (
	maxSkew = 100 * time.Millisecond
	// maxNamed is how many of the dead Degraded names.
	maxNamed = 3
)

// Degraded is nil, or what an operator should look at: no peers seen though some are expected, a split, the dead, no
// heartbeat, a clock that is off.
func (n *Node) Degraded() error {
	var all []string
	v := n.View()
	if err := n.lonely(); err != nil {
		all = append(all, err.Error())
	} else if _, foreign := n.foreigners(); v.Visible < v.Alive-foreign {
		all = append(all, fmt.Sprintf("%d of %d living nodes can be heard; limits are shared out", v.Visible, v.Alive-foreign))
	}
	if labels, k := n.foreigners(); k > 0 {
		all = append(all, fmt.Sprintf("%d nodes of another cluster (CLUSTER_LABEL %s, here %s) use this database; limits are shared out with them: give them a database of their own, or the same label",
			k, strings.Join(labels, ", "), n.config.Label))
	}
	for i, d := range v.Dead {
		if i == maxNamed {
			all = append(all, fmt.Sprintf("%d more nodes are dead or hang", len(v.Dead)-i))
			break
		}
		all = append(all, fmt.Sprintf("the node %s (%s) is dead or hangs: its last heartbeat was %s ago", cmp.Or(d.Name, d.ID.String()), d.Address, d.Silent.Round(time.Second)))
	}
	if k := n.countUnreachable(); k > 0 {
		all = append(all, fmt.Sprintf("%d nodes can be heard and not reached at the address that they advertise (CLUSTER_ADVERTISE)", k))
	}
	if n.config.Database != nil && !v.Witness {
		all = append(all, "the heartbeat does not reach the database")
	}
	if s := time.Duration(n.skew.Load()); max(s, -s) > maxSkew {
		all = append(all, fmt.Sprintf("the clock of this machine is %s off the database's; limits are corrected for it (is NTP running?)", s.Round(time.Millisecond)))
	}
	if len(all) == 0 {
		return nil
	}
	return errors.New(strings.Join(all, "; "))
}

func (n *Node) elapsed() int64 { return int64(time.Since(n.epoch)) }
