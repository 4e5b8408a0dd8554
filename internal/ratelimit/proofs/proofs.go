package proofs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
)

// Topic is the package's in a node's connections.
const Topic cluster.Topic = 'p'

// Life is how long a proof counts.
const Life = time.Hour

const (
	numShards = 16
	// Max bounds the proofs that a node remembers, 48 bytes or so each. Only holders of a channel's secret can
	// add one; when there are more, some are forgotten.
	Max = 1 << 16

	// renewEvery and tellEvery are how old a proof grows before another webhook renews it, and before the other nodes
	// hear of that: no lock for each webhook, and no message.
	renewEvery = time.Minute
	tellEvery  = 5 * time.Minute

	// gather is how long new proofs wait for others to travel with.
	gather = 20 * time.Millisecond
	// maxFresh bounds those that wait. One for which there is no room is told with its next renewal.
	maxFresh = 4096

	syncTimeout = 5 * time.Second
	syncPause   = 5 * time.Second // before a peer that did not answer is asked again
)

// Network is this node's place in the cluster, as *cluster.Node.
type Network interface {
	Watch() (*cluster.View, <-chan struct{})
	Broadcast(t cluster.Topic, body []byte) int
	Fetch(ctx context.Context, from cluster.ID, t cluster.Topic, each func(piece []byte) error) error
}

// Proofs are what a node remembers. Safe for concurrent use.
type Proofs struct {
	network Network
	log     *slog.Logger
	began   time.Time // proofs are timed from it, so that a step of the wall clock does not reach them
	fresh   chan ratelimit.Key
	shards  [numShards]shard

	mu     sync.Mutex
	synced map[cluster.ID]uint64 // sessions, plus one, of the peers whose proofs were fetched
}

type shard struct {
	sync.RWMutex
	proofs map[ratelimit.Key]proof
	swept  int32 // when what is over was last dropped
}

// proof is timed in seconds from Proofs.began.
type proof struct {
	until int32
	told  int32 // when all nodes were last told
}

// New makes the memory of a node; its handler for Topic must be Proofs.Handler. Without a network the node is alone, and
// Sync and Run are not to be called. It starts nothing.
func New(n Network, l *slog.Logger) *Proofs {
	p := &Proofs{network: n, log: l, began: time.Now(), fresh: make(chan ratelimit.Key, maxFresh), synced: map[cluster.ID]uint64{}}
	for i := range p.shards {
		p.shards[i].proofs = map[ratelimit.Key]proof{}
	}
	return p
}

func (p *Proofs) at(t time.Time) int32 { return int32(t.Sub(p.began) / time.Second) }

func (p *Proofs) shard(k ratelimit.Key) *shard { return &p.shards[k.Lo%numShards] }

func (s *shard) get(k ratelimit.Key) (proof, bool) {
	s.RLock()
	defer s.RUnlock()
	x, ok := s.proofs[k]
	return x, ok
}

// Has tells whether there is a proof that counts.
func (p *Proofs) Has(k ratelimit.Key, now time.Time) bool {
	x, ok := p.shard(k).get(k)
	return ok && x.until > p.at(now)
}

// Add notes a proof that was given now. It never blocks.
func (p *Proofs) Add(k ratelimit.Key, now time.Time) {
	at, s := p.at(now), p.shard(k)
	until := at + seconds(Life)
	x, ok := s.get(k)
	if ok && x.until > until-seconds(renewEvery) {
		return
	}
	told := at - seconds(tellEvery)
	if ok {
		told = x.told
	}
	s.set(k, proof{until, told}, at) // before anybody is to tell of it
	if p.network != nil && at-told >= seconds(tellEvery) {
		select {
		case p.fresh <- k:
			s.set(k, proof{until, at}, at)
		default: // the next renewal will tell
		}
	}
}

// set notes a proof, unless a longer one is known.
func (s *shard) set(k ratelimit.Key, x proof, now int32) {
	s.Lock()
	defer s.Unlock()
	known, ok := s.proofs[k]
	if !ok {
		s.makeRoom(now)
	}
	s.proofs[k] = proof{max(x.until, known.until), max(x.told, known.told)}
}

func (s *shard) makeRoom(now int32) {
	const most = Max / numShards
	if len(s.proofs) < most {
		return
	}
	if now-s.swept >= seconds(renewEvery) {
		s.swept = now
		maps.DeleteFunc(s.proofs, func(_ ratelimit.Key, x proof) bool { return x.until <= now })
	}
	for some := range s.proofs { // in random order
		if len(s.proofs) < most {
			return
		}
		delete(s.proofs, some)
	}
}

func seconds(d time.Duration) int32 { return int32(d / time.Second) }

// What travels is a version and then, for each proof, its key and for how many seconds it still counts.
const (
	wireVersion = 1
	proofBytes  = 18
	// pieceProofs is how many go into one message: far below cluster.MaxMessage, so that they delay nothing.
	pieceProofs = 2048
)

func appendProof(b []byte, k ratelimit.Key, left int32) []byte {
	if len(b) == 0 {
		b = append(b, wireVersion)
	}
	b = binary.BigEndian.AppendUint64(b, k.Hi)
	b = binary.BigEndian.AppendUint64(b, k.Lo)
	return binary.BigEndian.AppendUint16(b, uint16(left))
}

// merge takes in what another node knows: b was made by appendProof.
func (p *Proofs) merge(b []byte, now time.Time) error {
	if len(b) == 0 || b[0] != wireVersion || len(b[1:])%proofBytes != 0 {
		return errors.New("proofs: a message that can't be read")
	}
	at := p.at(now)
	for b = b[1:]; len(b) > 0; b = b[proofBytes:] {
		k := ratelimit.Key{Hi: binary.BigEndian.Uint64(b), Lo: binary.BigEndian.Uint64(b[8:])}
		left := min(int32(binary.BigEndian.Uint16(b[16:])), seconds(Life))
		// Whoever told this node told all.
		p.shard(k).set(k, proof{at + left, at - (seconds(Life) - left)}, at)
	}
	return nil
}

// Handler is what the node's connections call for Topic.
func (p *Proofs) Handler() cluster.Handler {
	return cluster.Handler{
		Receive: func(from cluster.ID, m cluster.Message) {
			if err := p.merge(m.Body, time.Now()); err != nil {
				p.log.Debug("proofs of another node are not used", slog.String("node", from.String()), slog.Any("error", err))
			}
		},
		State: func(_ context.Context, _ cluster.ID, send func([]byte) error) error { return p.tellAll(send) },
	}
}

// tellAll passes all that count on, in pieces.
func (p *Proofs) tellAll(send func([]byte) error) error {
	for i := range p.shards {
		for _, b := range p.shards[i].pieces(p.at(time.Now())) {
			if err := send(b); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *shard) pieces(now int32) (all [][]byte) {
	s.RLock()
	defer s.RUnlock()
	var b []byte
	for k, x := range s.proofs {
		if x.until > now {
			b = appendProof(b, k, x.until-now)
		}
		if len(b) > pieceProofs*proofBytes {
			all, b = append(all, b), nil
		}
	}
	if len(b) > 0 {
		all = append(all, b)
	}
	return all
}

// Sync asks each peer that can be heard for its proofs, unless that was done since its connection was made. It is to be
// called before a node takes requests. The errors are of peers that did not answer; Run asks them again.
func (p *Proofs) Sync(ctx context.Context) error {
	view, _ := p.network.Watch()
	p.mu.Lock()
	known := p.synced
	p.synced = make(map[cluster.ID]uint64, len(view.Peers)) // without those that are gone
	var ask []cluster.Peer
	for _, peer := range view.Peers {
		if session := peer.Session + 1; known[peer.ID] == session {
			p.synced[peer.ID] = session
		} else if peer.Standing == cluster.Visible {
			ask = append(ask, peer)
		}
	}
	p.mu.Unlock()
	errs := make([]error, len(ask))
	var wg sync.WaitGroup
	for i, peer := range ask {
		wg.Go(func() {
			err := p.network.Fetch(ctx, peer.ID, Topic, func(piece []byte) error { return p.merge(piece, time.Now()) })
			if err != nil && !errors.Is(err, cluster.ErrRefused) { // refused: an older program, that remembers none for others
				errs[i] = fmt.Errorf("proofs: of %v: %w", peer.ID, err)
				return
			}
			p.mu.Lock()
			p.synced[peer.ID] = peer.Session + 1
			p.mu.Unlock()
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Run tells the other nodes of new proofs, and asks those for theirs whose connection was made anew, until ctx ends; what
// is new then is told still. It returns nil.
func (p *Proofs) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		_, changed := p.network.Watch()
		var again <-chan time.Time
		asking, cancel := context.WithTimeout(ctx, syncTimeout)
		if err := p.Sync(asking); err != nil {
			p.log.Debug("proofs of other nodes could not be had", slog.Any("error", err))
			again = time.After(syncPause)
		}
		cancel()
		p.tell(ctx, changed, again)
	}
	return nil
}

// tell tells of new proofs, those of a moment together, until ctx ends or there is reason to ask for others.
func (p *Proofs) tell(ctx context.Context, changed <-chan struct{}, again <-chan time.Time) {
	var b []byte
	var due <-chan time.Time
	send := func() {
		if len(b) > 0 {
			p.network.Broadcast(Topic, b)
		}
		b, due = nil, nil
	}
	defer send()
	for {
		select {
		case k := <-p.fresh:
			b = p.append(b, k)
			if len(b) > pieceProofs*proofBytes {
				send()
			} else if due == nil {
				due = time.After(gather)
			}
		case <-due:
			send()
		case <-changed:
			return
		case <-again:
			return
		case <-ctx.Done():
			for len(p.fresh) > 0 { // at most maxFresh
				b = p.append(b, <-p.fresh)
			}
			return
		}
	}
}

// append appends a proof, if it still counts.
func (p *Proofs) append(b []byte, k ratelimit.Key) []byte {
	if x, ok := p.shard(k).get(k); ok {
		if left := x.until - p.at(time.Now()); left > 0 {
			return appendProof(b, k, left)
		}
	}
	return b
}
