package delivery

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/activity"
	"converger/internal/channel"
	"converger/internal/tenants"
)

const (
	// slots is the number of lanes of an unordered channel. Changing it is safe: old slots are worked until they are empty.
	slots = 16

	// An append hands lanes over itself only in small batches, while that is the fastest way; handing over always halved the
	// rate of acceptance.
	handoverLanes = 8
)

// Targets implements [activity.Targets], from memory. An activity goes to
//
//   - its conversation's own channel, unless the channel's participant wrote it. The channel's status is not looked at: what
//     is written while it is inactive waits for it.
//   - the targets of the channel's enabled routing rules, each once, that are active. For one that is inactive at this moment
//     no delivery is made, then or later. Rules of targets are not followed.
//
// Channels that are deleted or do not send drop out, as does each channel whose type made the activity as its reply: two
// bots would never stop. Life-cycle news and typing go to webhooks only: people do not want to read them.
func (s *Service) Targets(ch uuid.UUID, a *activity.New) []activity.Target {
	own, ok := s.directory.Channel(ch)
	if !ok {
		return nil
	}
	var targets []activity.Target
	if byParticipant := a.Sender != "" && a.Sender == a.ParticipantExternalID; !byParticipant && s.gets(own, a) {
		targets = append(targets, activity.Target{ChannelID: ch, Ordered: own.Ordered})
	}
	for _, id := range s.directory.Routes(ch) {
		target, ok := s.directory.Channel(id)
		// The array of targets has no foreign key: a row that names another tenant's channel must lead nowhere.
		if !ok || target.TenantID != own.TenantID || channel.Status(target.Status) != channel.StatusActive || !s.gets(target, a) {
			continue
		}
		targets = append(targets, activity.Target{ChannelID: id, Ordered: target.Ordered})
	}
	return targets
}

// gets reports whether a channel, by its type and mode, delivers an activity.
func (s *Service) gets(ch *tenants.ChannelEntry, a *activity.New) bool {
	typ := channel.Type(ch.Type)
	_, sends := s.sender(typ)
	return sends && channel.Mode(ch.Mode).Sends() && wants(typ, a.Type) && a.Caller != replyCaller(typ)
}

// wants reports whether channels of a type get activities of a type at all.
func wants(t channel.Type, activityType string) bool {
	switch activityType {
	case activity.TypeDeliveryReceipt:
		return false
	case activity.TypeTyping, activity.TypeConversationUpdate:
		return t == channel.TypeWebhook
	}
	return true
}

func (s *Service) sender(t channel.Type) (channel.Sender, bool) { return senderOf(s.registry, t) }

func senderOf(registry *channel.Registry, t channel.Type) (channel.Sender, bool) {
	adapter, ok := registry.Lookup(t)
	if !ok {
		return nil, false
	}
	sender, ok := adapter.(channel.Sender)
	return sender, ok
}

// EnqueueTx implements [activity.Enqueuer]: it inserts a delivery for each piece of work and wakes its lane, all in one
// statement. While the node has little to do it also leases the lanes, and wake starts them here. wake must be called after
// the commit and only then. Work whose delivery exists already is an error of the caller.
func (s *Service) EnqueueTx(ctx context.Context, tx pgx.Tx, work []activity.Work) (wake func(), err error) {
	if len(work) == 0 {
		return func() {}, nil
	}
	w := newWakeup(work)
	handover := s.jobs != nil && len(w.lanes) <= handoverLanes && s.mayGoAhead(w)
	token := newID()
	leased, err := enqueueTx(ctx, tx, w, handover, token, s.o.Lease)
	if err != nil {
		return nil, fmt.Errorf("enqueue deliveries: %w", err)
	}
	return func() {
		s.startLanes(laneJobs(leased, token))
		if len(leased) < len(w.lanes) {
			s.pokeDispatcher()
		}
	}, nil
}

// mayGoAhead reports whether lanes can be handed over without the dispatcher and spoil nobody's turn: none of their tenants
// has lanes that wait for theirs, and of the workers more than a fair share is free. So who has little to send does not
// wait behind who has much.
func (s *Service) mayGoAhead(w wakeup) bool {
	var waiting tenantSet
	if behind := s.behind.Load(); behind != nil {
		waiting = *behind
	}
	if s.running.Load() >= int64(fairShare(s.o.Workers, len(waiting)+1)) {
		return false
	}
	for i := range w.lanes {
		if _, ok := waiting[w.lanes[i].tenant]; ok {
			return false
		}
	}
	return true
}

// startLanes has this node work lanes that it has leased; when it cannot, they go back to those that wait.
func (s *Service) startLanes(jobs []LaneJob) {
	if len(jobs) == 0 {
		return
	}
	if s.jobs.StartLanes(jobs) {
		s.m.handedOver.WithLabelValues("append").Add(float64(len(jobs)))
		return
	}
	for _, job := range jobs {
		select {
		case s.outcomes <- newOutcome(&lane{job: job}, nil, giveBack(0), s.o.LeaseMargin):
		default: // a full queue of a node that stops: the lease ends
		}
	}
	s.pokeDispatcher()
}

// replyCaller is the caller of the replies that a type's adapter makes.
func replyCaller(t channel.Type) string { return string(t) }

// laneKey names a lane: the channel and the conversation or slot.
type laneKey struct{ channel, key uuid.UUID }

func (k laneKey) compare(o laneKey) int {
	return cmp.Or(bytes.Compare(k.channel[:], o.channel[:]), bytes.Compare(k.key[:], o.key[:]))
}

// wakeLane is a lane to wake; nth counts from 1 among those of its channel, for the caps.
type wakeLane struct {
	laneKey
	tenant uuid.UUID
	nth    int
}

// wakeup is one EnqueueTx: the lanes in the order in which everybody locks them, and the deliveries.
type wakeup struct {
	lanes      []wakeLane
	deliveries []newDelivery
}

type newDelivery struct {
	activity.Work
	laneKey
	seq int64 // the order within the lane
}

func newWakeup(work []activity.Work) wakeup {
	w := wakeup{deliveries: make([]newDelivery, len(work))}
	seen := make(map[laneKey]struct{}, len(work))
	for i, x := range work {
		d := newDelivery{Work: x, laneKey: laneKey{x.ChannelID, x.ConversationID}, seq: x.Seq}
		if !x.Ordered {
			// Conversations share a slot and their numbers do not compare: the order there is that of arrival.
			d.key, d.seq = slot(x.ConversationID), arrival(x.ActivityID)
		}
		w.deliveries[i] = d
		if _, ok := seen[d.laneKey]; !ok {
			seen[d.laneKey] = struct{}{}
			w.lanes = append(w.lanes, wakeLane{laneKey: d.laneKey, tenant: x.TenantID})
		}
	}
	slices.SortFunc(w.lanes, func(a, b wakeLane) int { return a.compare(b.laneKey) })
	for i := range w.lanes {
		w.lanes[i].nth = 1
		if i > 0 && w.lanes[i-1].channel == w.lanes[i].channel {
			w.lanes[i].nth = w.lanes[i-1].nth + 1
		}
	}
	return w
}

// slot is the lane key of a conversation in an unordered channel: the slot's number as a UUID. A conversation's id, a
// UUIDv7 of our century, is never that small.
func slot(conversation uuid.UUID) (key uuid.UUID) {
	key[15] = conversation[15] % slots // the last byte of a UUIDv7 is random
	return key
}

// isSlot tells the key of a slot from a conversation's id.
func isSlot(key uuid.UUID) bool { return binary.BigEndian.Uint64(key[:8]) == 0 }

// arrival makes a number of the time in a UUIDv7 (RFC 9562, 5.7: 48 bits of milliseconds, the version, and 12 bits that
// package uuid uses for what is between two milliseconds).
func arrival(id uuid.UUID) int64 {
	n := binary.BigEndian.Uint64(id[:8])
	return int64(n>>16<<12 | n&0xfff)
}

func laneJobs(lanes []uuid.UUID, token uuid.UUID) []LaneJob {
	jobs := make([]LaneJob, len(lanes))
	for i, id := range lanes {
		jobs[i] = LaneJob{LaneID: id, LeaseToken: token}
	}
	return jobs
}

// newID makes a UUIDv7. The system's random source does not fail on the platforms that Go supports (it would crash).
func newID() uuid.UUID { return uuid.Must(uuid.NewV7()) }
