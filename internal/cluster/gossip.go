package cluster

import (
	"context"
	"io"
	"log"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// gossip is memberlist: who is a member, agreed on by gossip and probes. It tells of arrivals and failures; whether a
// member can be reached from here, only its connection tells.
type gossip struct{ list *memberlist.Memberlist }

// newGossip starts memberlist on the transport. It sends with the first of keys and accepts all.
func newGossip(label string, id ID, keys [][]byte, meta []byte, t *transport, at netip.AddrPort, n *news, logger *log.Logger) (*gossip, error) {
	c := memberlist.DefaultLANConfig()
	c.Name = id.String()
	c.Label = label
	ring, err := memberlist.NewKeyring(keys, keys[0])
	if err != nil {
		return nil, err
	}
	c.Keyring = ring
	c.Transport = t
	c.BindPort = t.port
	c.AdvertiseAddr, c.AdvertisePort = at.Addr().String(), int(at.Port())
	c.TCPTimeout = 2 * time.Second // also of a join to an address where nobody answers
	c.GossipInterval = 100 * time.Millisecond
	c.EnableCompression = false // the lists are small, and compressing them cost more than all the rest of gossip
	c.Delegate = silent{meta}
	c.Events = n
	c.Logger = logger
	list, err := memberlist.Create(c)
	if err != nil {
		return nil, err
	}
	return &gossip{list}, nil
}

// join exchanges the lists of members with whoever answers at the address.
func (g *gossip) join(a netip.AddrPort) error {
	_, err := g.list.Join([]string{a.String()})
	return err
}

// silent is a delegate that sends nothing through gossip: its queue is no message bus.
type silent struct{ meta []byte }

// NodeMeta implements [memberlist.Delegate].
func (s silent) NodeMeta(int) []byte { return s.meta }

// NotifyMsg implements [memberlist.Delegate].
func (silent) NotifyMsg([]byte) {}

// GetBroadcasts implements [memberlist.Delegate].
func (silent) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState implements [memberlist.Delegate].
func (silent) LocalState(bool) []byte { return nil }

// MergeRemoteState implements [memberlist.Delegate].
func (silent) MergeRemoteState([]byte, bool) {}

// tiding is one change that gossip tells of.
type tiding struct {
	id    ID
	m     member
	alive bool
}

// news holds what gossip told until the keeper takes it. memberlist calls it under its own lock, so it copies and returns.
type news struct {
	mu      sync.Mutex
	queue   []tiding
	members map[ID]netip.AddrPort // alive, this node included
	signal  chan struct{}
}

func newNews() *news { return &news{members: map[ID]netip.AddrPort{}, signal: make(chan struct{}, 1)} }

// addresses of the members that gossip calls alive, this node included. They are noted here, since what
// memberlist.Members returns is changed while one reads it.
func (n *news) addresses() []netip.AddrPort {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Collect(maps.Values(n.members))
}

func (n *news) put(node *memberlist.Node, alive bool) {
	id, err := ParseID(node.Name)
	if err != nil {
		return // none of ours
	}
	t := tiding{id: id, alive: alive}
	var at netip.AddrPort
	if alive {
		if t.m, err = decodeMember(node.Meta); err != nil {
			return
		}
		if a, ok := netip.AddrFromSlice(node.Addr); ok {
			at = netip.AddrPortFrom(a.Unmap(), node.Port)
			t.m.Address = at.String()
		}
	}
	n.mu.Lock()
	n.queue = append(n.queue, t)
	if delete(n.members, id); alive {
		n.members[id] = at
	}
	n.mu.Unlock()
	select {
	case n.signal <- struct{}{}:
	default:
	}
}

func (n *news) take() []tiding {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.queue
	n.queue = nil
	return t
}

// NotifyJoin implements [memberlist.EventDelegate].
func (n *news) NotifyJoin(node *memberlist.Node) { n.put(node, true) }

// NotifyLeave implements [memberlist.EventDelegate].
func (n *news) NotifyLeave(node *memberlist.Node) { n.put(node, false) }

// NotifyUpdate implements [memberlist.EventDelegate].
func (n *news) NotifyUpdate(node *memberlist.Node) { n.put(node, true) }

// newGossipLog makes memberlist's logger. Its chatter is for debugging; strangers and a half-closed port are for operators.
func newGossipLog(to *slog.Logger, s *strangers) *log.Logger {
	return log.New(gossipLog{to, s}, "", 0)
}

type gossipLog struct {
	to        *slog.Logger
	strangers *strangers
}

var _ io.Writer = gossipLog{}

// Write implements [io.Writer] for whole lines.
func (g gossipLog) Write(b []byte) (int, error) {
	line := strings.TrimSpace(string(b))
	detail := slog.String("detail", line)
	switch {
	// Texts of memberlist v0.7.0; one that is missed only shows at the level of debugging.
	case strings.Contains(line, "unacceptable label"), strings.Contains(line, "ecrypt"), strings.Contains(line, "label header"):
		_, from, _ := strings.Cut(line, "from=")
		from, _, _ = strings.Cut(from, " ")
		g.strangers.refused(from, "refused gossip from another cluster, or with another CLUSTER_SECRET or CLUSTER_LABEL", detail)
	case strings.Contains(line, "misconfigured"):
		g.to.Warn("a member is reached by TCP and not by UDP: open the port for both", detail)
	default:
		g.to.Log(context.Background(), slog.LevelDebug, "gossip", detail)
	}
	return len(b), nil
}
