package cluster

import "time"

// Standing is what this node makes of a peer.
type Standing uint8

// The standings of a peer. A dead one has none: see [View.Dead].
const (
	// Joining: known, and not yet heard. It admits nothing yet, so it counts neither as visible nor as alive.
	Joining Standing = iota
	// Visible: heard within the last 500 ms.
	Visible
	// Split: not heard, yet it lives, as far as anybody can tell: it admits requests on its side.
	Split
	numStandings
)

// String names the standing as metrics and the status page do.
func (s Standing) String() string { return [numStandings]string{"joining", "visible", "split"}[s] }

// View is the cluster as this node sees it at one moment. It is shared: do not change it.
type View struct {
	// Peers are the other nodes, by rising ID, without the dead and those that left.
	Peers []Peer
	// Dead are the nodes that were killed, hang or are cut off from everything, for an operator to miss: see [Dead].
	Dead []Dead
	// Visible and Alive count nodes, this one included. A node that sees Visible of Alive nodes enforces that share of a
	// limit: the sum over the sides of a split is the limit.
	Visible, Alive int
	// Witness tells whether the database vouches for the living and the dead. Without it silent peers count as alive.
	Witness bool
	// Skew is how far this node's wall clock is ahead of the database's; 0 until it was compared.
	Skew time.Duration
}

// Dead is a node of this cluster that has neither been heard nor written a heartbeat for three seconds, and has not said that
// it leaves. It has no part in limits any more, and stays in the view for ten minutes, unless it is back or has a successor: a
// living node at its address, or one of its name that started later. Of many only the last 16 are in the view, the
// last first. That is the database's word: all nodes give it, those that started since too.
type Dead struct {
	ID            ID
	Name, Address string
	Version       string
	Started       time.Time // by its own clock
	// Silent is how long ago its last heartbeat was, when the view was made.
	Silent time.Duration
}

// Peer is another node, as of its view.
type Peer struct {
	ID       ID
	Name     string // the operator's word for it (CLUSTER_NODE_NAME); not unique, may be empty
	Address  string // host:port, for operators; empty while only its connection is known
	Version  string
	Started  time.Time // by its own clock
	Standing Standing
	// Starting tells that it does not take requests yet: see Config.Starting.
	Starting bool
	// Heard is how long ago its last message arrived, when the view was made; -1 if none ever did.
	Heard time.Duration
	// Latency is the smoothed one-way delay of messages: half their round trip. 0 until it was measured.
	Latency time.Duration
	// Skew is how far the peer's wall clock is ahead of the database's, in its own words.
	Skew time.Duration
	// Session counts the streams opened between the two, either way: when it has grown, messages to it or from it may have
	// been lost. 0: none yet.
	Session uint64
	// Connected tells whether messages can be sent to it now.
	Connected bool
	// Queued and Dropped count messages to it: waiting now, and given up since its first session.
	Queued  int
	Dropped uint64
}
