package cluster

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
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
	ErrSecretRequired = errors.New("cluster: a secret is required beyond loopback")
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
	// Database takes the heartbeats. It should be a pool of the node's own: a heartbeat must not wait for requests. nil:
	// no witness; gossip alone tells who lives, and the clock is not corrected. For tests.
	Database *pgxpool.Pool
	// Now is the clock that is corrected, in Unix nanoseconds. It must not step. nil: the wall clock at New, and
	// monotonic time since.
	Now func() int64
	// Registerer receives the metrics; nil: none.
	Registerer prometheus.Registerer
	// Logger; nil: slog.Default.
	Logger *slog.Logger
}

// Node is this member. All methods are safe for concurrent use.
type Node struct{}

// New makes a node. It starts nothing and opens nothing.
func New(c Config) (*Node, error) { return &Node{}, nil }

// Handle registers the handler of a topic. It must be called before Run, once for a topic.
func (n *Node) Handle(t Topic, h Handler) {}

// Run opens the port, joins the cluster and stays in it until ctx ends; then it lets queued messages go out, leaves, and
// returns nil. It fails when the port can't be had or no address can be advertised; a database or peers that are away
// are no failure. It is called once.
func (n *Node) Run(ctx context.Context) error { return nil }

// ID is this start's identity.
func (n *Node) ID() ID { return 0 }

// View is the cluster as seen now, at most 100 ms old. It costs one atomic read.
func (n *Node) View() *View { return nil }

// Watch is View, with a channel that is closed when Peers, a Standing, a Session, Connected or Witness changes. Plain
// ageing and measuring close nothing.
func (n *Node) Watch() (*View, <-chan struct{}) { return nil, nil }

// Settled is closed once the first attempt to join is over: peers are connected, or none answered. Before it nothing is
// known; a node should not take requests. It takes at most 3 s from the start of Run.
func (n *Node) Settled() <-chan struct{} { return nil }

// SetServing tells the others, through the database, that this node admits requests (or no longer does): a node that
// doesn't is no side of a split.
func (n *Node) SetServing(bool) {}

// Send queues a message for a member and reports whether it did; it never blocks. Messages are dropped, and counted, when
// the member is not connected or its queue is full, and those still queued when a connection breaks. body must not be
// changed afterwards, and has at most MaxMessage bytes.
func (n *Node) Send(to ID, t Topic, body []byte) bool { return false }

// Broadcast is Send to every connected peer; it returns to how many.
func (n *Node) Broadcast(t Topic, body []byte) int { return 0 }

// Flush returns once the messages queued before it have been handled by their receivers, or ctx ends.
func (n *Node) Flush(ctx context.Context) error { return nil }

// Call asks a member and waits for the answer. ctx needs a deadline. Errors are ErrUnreachable (at once if there is no
// connection), ErrRefused and those of ctx.
func (n *Node) Call(ctx context.Context, to ID, t Topic, request []byte) ([]byte, error) {
	return nil, ErrUnreachable
}

// Fetch asks a member for its state and passes it on piece by piece; each owns its piece. Errors are as of Call, and each's.
func (n *Node) Fetch(ctx context.Context, from ID, t Topic, each func(piece []byte) error) error {
	return ErrUnreachable
}

// Offset is what must be added to the clock of Config.Now to have the cluster's: the database's while it can be reached,
// else the median of the members' clocks. One atomic read. It changes by microseconds while clocks agree, and by more when
// the database's clock steps.
func (n *Node) Offset() time.Duration { return 0 }

// Now is the corrected clock, in Unix nanoseconds.
func (n *Node) Now() int64 { return 0 }

// Ready is nil, or why the node should not take traffic yet: it expects peers, sees none, and has been running for less
// than ten seconds.
func (n *Node) Ready() error { return nil }

// Degraded is nil, or what an operator should look at: no peers seen though some are expected, a split, no heartbeat, a
// clock that is off.
func (n *Node) Degraded() error { return nil }
