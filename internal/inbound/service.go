package inbound

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/activity"
	"converger/internal/channel"
	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/tenants"
)

// Options of a Service. The zero value is usable.
type Options struct {
	// MaxTries is how often a job works an event that makes it fail, other than by an unavailable database; 0 means 5.
	MaxTries   int
	Registerer prometheus.Registerer // nil: metrics are counted but not exported
	Logger     *slog.Logger          // nil: silent
}

// Service receives and works inbound events. Its methods are safe for concurrent use.
type Service struct {
	pool       *pgxpool.Pool
	channels   *channel.Store
	registry   *channel.Registry
	activities *activity.Store
	receipts   Receipts
	jobs       Jobs
	maxTries   int
	log        *slog.Logger
	m          *metrics
}

// NewService makes a Service. It starts nothing.
func NewService(pool *pgxpool.Pool, channels *channel.Store, registry *channel.Registry, activities *activity.Store,
	receipts Receipts, o Options) *Service {
	log := o.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Service{
		pool: pool, channels: channels, registry: registry, activities: activities, receipts: receipts,
		maxTries: cmp.Or(o.MaxTries, 5), log: log, m: newMetrics(o.Registerer),
	}
}

// SetJobs sets the queue of the workers. It must be called before the first Receive.
func (s *Service) SetJobs(j Jobs) { s.jobs = j }

func (s *Service) receiver(ch *channel.Channel) (channel.Receiver, error) {
	adapter, ok := s.registry.Lookup(ch.Type)
	if !ok {
		return nil, ErrNotAccepting
	}
	r, ok := adapter.(channel.Receiver)
	if !ok {
		return nil, ErrNotAccepting
	}
	return r, nil
}

// Verify checks that a request comes from who may post to the channel, over the exact bytes of its body. It touches no
// database. The errors are ErrNotAccepting, and around [channel.ErrUnsigned] or [channel.ErrSignature].
func (s *Service) Verify(r Request) error {
	adapter, err := s.receiver(r.Channel)
	if err != nil {
		return err
	}
	if r.PathSecret != "" && !keepsPath(adapter, r.Channel) {
		err = fmt.Errorf("%w: the channel's address holds no secret", channel.ErrSignature)
	} else {
		err = adapter.Verify(r.Channel, channel.Request{Header: r.Header, PathSecret: r.PathSecret, Body: r.Body, Now: r.Now})
	}
	if err != nil {
		s.m.refused(r.Channel.Type, err)
		return err
	}
	return nil
}

func keepsPath(adapter channel.Receiver, ch *channel.Channel) bool {
	keeper, ok := adapter.(channel.PathKeeper)
	return ok && keeper.KeepsPath(ch)
}

// Receive stores a verified request, and works it too unless its provider wants a fast answer. What it returns without an
// error is durable. ErrUnreadable, ErrNoReceipt and ErrNotAccepting come after the event was stored as failed: a repeat of
// the same bytes would not help the sender. Other errors mean that nothing was stored.
func (s *Service) Receive(ctx context.Context, r Request) (Answer, error) {
	adapter, err := s.receiver(r.Channel)
	if err != nil {
		return Answer{}, err
	}
	id, err := uuid.NewV7()
	if err != nil {
		return Answer{}, fmt.Errorf("inbound: make event id: %w", err)
	}
	if adapter.ProviderAck() {
		return s.acknowledge(ctx, id, r)
	}

	in, parseErr := adapter.Parse(r.Channel, r.Endpoint, r.Header, r.Body, r.Now)
	refusal := s.refusal(r.Channel, r.Endpoint, &in, parseErr)
	if refusal != nil {
		if err := s.store(ctx, s.pool, id, r, StateFailed, refusal.Error(), nil); err != nil {
			return Answer{}, err
		}
		s.m.events.WithLabelValues(string(r.Channel.Type), string(StateFailed)).Inc()
		return Answer{EventID: id}, refusal
	}
	var result Result
	err = s.transact(ctx, func(tx pgx.Tx) (func(), error) {
		var after func()
		var err error
		if result, after, err = s.workTx(ctx, tx, r.Channel, id, in); err != nil {
			return nil, err
		}
		return after, s.store(ctx, tx, id, r, result.state(), "", &result)
	})
	if err != nil {
		return Answer{}, fmt.Errorf("inbound: receive: %w", err)
	}
	s.m.worked(r.Channel.Type, result)
	return Answer{EventID: id, Result: result}, nil
}

// acknowledge stores the event and its job.
func (s *Service) acknowledge(ctx context.Context, id uuid.UUID, r Request) (Answer, error) {
	err := s.transact(ctx, func(tx pgx.Tx) (func(), error) {
		if err := s.store(ctx, tx, id, r, StateReceived, "", nil); err != nil {
			return nil, err
		}
		return s.jobs.PokeInbound, s.jobs.InsertInboundTx(ctx, tx, r.Channel.TenantID, id)
	})
	if err != nil {
		return Answer{}, fmt.Errorf("inbound: store event: %w", err)
	}
	return Answer{EventID: id, Acknowledged: true}, nil
}

// refusal tells why a body as a whole can't be used, nil if it can. A channel that takes no messages still takes receipts.
func (s *Service) refusal(ch *channel.Channel, endpoint channel.Endpoint, in *channel.Inbound, parseErr error) error {
	var unreadable *channel.ParseError
	switch {
	case errors.As(parseErr, &unreadable):
		return fmt.Errorf("%w: %s", ErrUnreadable, unreadable.Detail)
	case parseErr != nil:
		return fmt.Errorf("%w: %w", ErrUnreadable, parseErr)
	case endpoint == channel.EndpointStatus && len(in.Receipts) == 0 && len(in.Rejected) == 0 && len(in.Ignored) == 0 && len(in.Messages) > 0:
		return ErrNoReceipt
	case !ch.Mode.Receives() && len(in.Messages) > 0 && len(in.Receipts) == 0:
		return ErrNotAccepting
	}
	if !ch.Mode.Receives() {
		for _, m := range in.Messages {
			in.Ignored = append(in.Ignored, channel.Ignored{Kind: "message", ID: m.ProviderID, Reason: "the channel's mode is outbound"})
		}
		in.Messages = nil
	}
	return nil
}

// Process works a stored event: the job of provider-acknowledged types and of replays. It returns nil when there is
// nothing left to do, also for an event that is worked already or can't be worked; an error asks for another try.
func (s *Service) Process(ctx context.Context, tenant tenants.ID, event uuid.UUID) error {
	err := s.process(ctx, tenant, event)
	if err == nil || ctx.Err() != nil || postgres.IsUnavailable(err) {
		return err
	}
	// Not the database's absence: it may fail the same way for ever, so the tries are counted where they outlive the job.
	failed, countErr := s.countFailure(ctx, tenant, event, err)
	if countErr != nil {
		return errors.Join(err, countErr)
	}
	s.log.Error("inbound event could not be worked", slog.String("event_id", event.String()), slog.Any("error", err), slog.Bool("given_up", failed))
	if failed {
		return nil
	}
	return err
}

func (s *Service) process(ctx context.Context, tenant tenants.ID, event uuid.UUID) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("inbound: panic: %v\n%s", p, debug.Stack())
		}
	}()
	// The channel is read before the transaction begins: nothing here holds one connection while it asks for another.
	seen, err := s.Get(ctx, tenant, event)
	if errors.Is(err, ErrNotFound) || err == nil && seen.State != StateReceived {
		return nil
	}
	if err != nil {
		return err
	}
	ch, err := s.channels.Get(ctx, tenant, seen.ChannelID)
	deleted := errors.Is(err, channel.ErrNotFound)
	if err != nil && !deleted {
		return err
	}
	var state State
	var result Result
	err = s.transact(ctx, func(tx pgx.Tx) (func(), error) {
		state = ""
		ev, kept, err := s.lockTx(ctx, tx, tenant, event)
		if errors.Is(err, ErrNotFound) || err == nil && ev.State != StateReceived {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		if deleted {
			state = StateFailed
			return nil, s.finishTx(ctx, tx, tenant, event, StateFailed, "the channel was deleted", nil)
		}
		adapter, err := s.receiver(&ch)
		if err != nil {
			state = StateFailed
			return nil, s.finishTx(ctx, tx, tenant, event, StateFailed, err.Error(), nil)
		}
		h, err := header(kept)
		if err != nil {
			return nil, err
		}
		in, parseErr := adapter.Parse(&ch, ev.Endpoint, h, ev.Body, ev.InsertedAt)
		if refusal := s.refusal(&ch, ev.Endpoint, &in, parseErr); refusal != nil {
			state = StateFailed
			return nil, s.finishTx(ctx, tx, tenant, event, StateFailed, refusal.Error(), nil)
		}
		var after func()
		if result, after, err = s.workTx(ctx, tx, &ch, event, in); err != nil {
			return nil, err
		}
		state = result.state()
		return after, s.finishTx(ctx, tx, tenant, event, state, "", &result)
	})
	switch {
	case err != nil:
		return err
	case state == StateFailed:
		s.m.events.WithLabelValues(string(ch.Type), string(state)).Inc()
	case state != "":
		s.m.worked(ch.Type, result)
	}
	return nil
}

// Replay queues a rejected or failed event again, records who asked for it, and returns the event as it is now. The errors
// are ErrNotFound and ErrNotReplayable.
func (s *Service) Replay(ctx context.Context, by tenants.Actor, tenant tenants.ID, event uuid.UUID) (Event, error) {
	err := s.transact(ctx, func(tx pgx.Tx) (func(), error) {
		ev, _, err := s.lockTx(ctx, tx, tenant, event)
		if err != nil {
			return nil, err
		}
		if ev.State != StateFailed && ev.State != StateRejected {
			return nil, ErrNotReplayable
		}
		if err := s.reopenTx(ctx, tx, tenant, event); err != nil {
			return nil, err
		}
		err = tenants.AuditTx(ctx, tx, by, tenants.Entry{
			TenantID: &tenant, Action: "retry", ResourceType: "inbound_event", ResourceID: event.String(),
			Before: map[string]any{"state": ev.State, "error": ev.Error}, After: map[string]any{"state": StateReceived},
		})
		if err != nil {
			return nil, err
		}
		return s.jobs.PokeInbound, s.jobs.InsertInboundTx(ctx, tx, tenant, event)
	})
	if err != nil {
		return Event{}, fmt.Errorf("inbound: replay: %w", err)
	}
	return s.Get(ctx, tenant, event)
}

// transact runs fn in a transaction, again when it lost a deadlock, and calls what fn returned after the commit.
func (s *Service) transact(ctx context.Context, fn func(tx pgx.Tx) (after func(), err error)) error {
	for try := 0; ; try++ {
		var after func()
		err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) (err error) {
			after, err = fn(tx)
			return err
		})
		if err != nil && postgres.IsSerialization(err) && try < 3 {
			continue
		}
		if err == nil && after != nil {
			after()
		}
		return err
	}
}

func (r *Result) state() State {
	if len(r.Rejected) > 0 {
		return StateRejected
	}
	return StateProcessed
}

// workTx turns what a body held into activities and receipts. after must be called once the transaction is committed.
func (s *Service) workTx(ctx context.Context, tx pgx.Tx, ch *channel.Channel, event uuid.UUID, in channel.Inbound) (Result, func(), error) {
	result := Result{ActivityIDs: []uuid.UUID{}, Rejected: []Rejected{}, Ignored: []Ignored{}}
	for _, r := range in.Rejected {
		result.Rejected = append(result.Rejected, Rejected{Index: r.Index, ID: r.ID, Reason: ReasonInvalid, Fields: r.Err.Fields})
	}
	for _, i := range in.Ignored {
		result.Ignored = append(result.Ignored, Ignored{Kind: i.Kind, ID: i.ID, Reason: i.Reason})
	}
	after, err := s.messagesTx(ctx, tx, ch, event, in.Messages, &result)
	if err != nil {
		return Result{}, nil, err
	}
	if len(in.Receipts) > 0 {
		result.Receipts, result.UnknownReceipts, err = s.receipts.ApplyReceiptsTx(ctx, tx, ch.TenantID, ch.ID, in.Receipts)
		if err != nil {
			return Result{}, nil, fmt.Errorf("apply receipts: %w", err)
		}
	}
	slices.SortStableFunc(result.Rejected, func(a, b Rejected) int { return cmp.Compare(a.Index, b.Index) })
	return result, after, nil
}

// message is one message on its way.
type message struct {
	channel.Message
	claim        string    // its id in the channel
	activityID   uuid.UUID // its own, or that of the message it repeats
	repeat       bool
	rejected     bool
	conversation uuid.UUID
	external     string // participant's external id
	author       string
}

func (s *Service) messagesTx(ctx context.Context, tx pgx.Tx, ch *channel.Channel, event uuid.UUID, in []channel.Message, result *Result) (func(), error) {
	if len(in) == 0 {
		return nil, nil
	}
	messages := make([]*message, len(in))
	for i, m := range in {
		id, err := uuid.NewV7()
		if err != nil {
			return nil, fmt.Errorf("make activity id: %w", err)
		}
		claim := m.ProviderID
		if claim == "" {
			claim = fmt.Sprintf("event:%s:%d", event, m.Index)
		}
		messages[i] = &message{Message: m, claim: claim, activityID: id}
	}
	if err := s.claimTx(ctx, tx, ch, messages); err != nil {
		return nil, err
	}
	reject := func(m *message, reason string, err error) {
		m.rejected = true
		r := Rejected{Index: m.Index, ID: m.ProviderID, Reason: reason}
		var invalid *fault.Invalid
		if errors.As(err, &invalid) {
			r.Fields = invalid.Fields
		}
		result.Rejected = append(result.Rejected, r)
	}
	if err := s.conversationsTx(ctx, tx, ch, messages); err != nil {
		return nil, err
	}
	if err := s.referencesTx(ctx, tx, ch, messages); err != nil {
		return nil, err
	}

	var appended []*message
	var news []activity.New
	for _, m := range messages {
		if m.repeat {
			continue
		}
		n, err := m.new(ch)
		if err == nil {
			err = activity.Validate(&n)
		}
		if err != nil {
			reject(m, ReasonInvalid, err)
			continue
		}
		appended, news = append(appended, m), append(news, n)
	}
	var after func()
	if len(news) > 0 {
		var results []activity.Result
		var err error
		if results, after, err = s.activities.AppendTx(ctx, tx, news); err != nil {
			return nil, fmt.Errorf("append: %w", err)
		}
		for i, res := range results {
			var invalid *fault.Invalid
			switch {
			case res.Repeat: // of a message whose claim has aged out
				appended[i].repeat, appended[i].activityID = true, res.Activity.ID
			case res.Err == nil:
				result.Created++
			case errors.Is(res.Err, activity.ErrNotFound):
				reject(appended[i], ReasonConversationNotFound, res.Err)
			case errors.Is(res.Err, activity.ErrClosed):
				reject(appended[i], ReasonConversationClosed, res.Err)
			case errors.Is(res.Err, activity.ErrKeyReused):
				reject(appended[i], ReasonInvalid, fault.Invalidf("/idempotency_key", fault.Conflict,
					"was used for another message of this conversation"))
			case errors.As(res.Err, &invalid):
				reject(appended[i], ReasonInvalid, res.Err)
			default:
				return nil, fmt.Errorf("append: %w", res.Err)
			}
		}
	}
	var unclaim []string
	for _, m := range messages {
		switch {
		case m.rejected:
			unclaim = append(unclaim, m.claim)
		case m.repeat:
			result.Duplicates++
			result.ActivityIDs = append(result.ActivityIDs, m.activityID)
		default:
			result.ActivityIDs = append(result.ActivityIDs, m.activityID)
		}
	}
	if len(unclaim) > 0 {
		if err := s.unclaimTx(ctx, tx, ch, unclaim); err != nil {
			return nil, err
		}
	}
	return after, nil
}

// conversationsTx finds or makes the participants and conversations of the messages that name none. All participants come
// before all conversations, each in one order, so that two events about the same people can't deadlock.
func (s *Service) conversationsTx(ctx context.Context, tx pgx.Tx, ch *channel.Channel, messages []*message) error {
	var people []*message
	for _, m := range messages {
		switch {
		case m.repeat:
		case m.ConversationID != nil:
			m.conversation = *m.ConversationID
			if m.Participant != nil {
				m.external = m.Participant.ExternalID()
			}
		case m.Participant != nil:
			people = append(people, m)
		}
	}
	slices.SortStableFunc(people, func(a, b *message) int {
		return cmp.Compare(a.Participant.ExternalID(), b.Participant.ExternalID())
	})
	byPerson := map[uuid.UUID][]*message{}
	var persons []uuid.UUID
	for _, m := range people {
		p, err := s.activities.ResolveParticipantTx(ctx, tx, ch.TenantID, ch.ID, *m.Participant)
		if err != nil {
			return fmt.Errorf("resolve participant: %w", err)
		}
		m.external, m.author = p.ExternalID, "participant:"+p.ID.String()
		if m.Sender == m.Participant.ExternalID() {
			m.Sender = p.ExternalID // one person, one sender, also when a better name turns up later
		}
		if byPerson[p.ID] == nil {
			persons = append(persons, p.ID)
		}
		byPerson[p.ID] = append(byPerson[p.ID], m)
	}
	slices.SortFunc(persons, func(a, b uuid.UUID) int { return slices.Compare(a[:], b[:]) })
	source := json.RawMessage(`{"source":"inbound_webhook"}`)
	for _, person := range persons {
		c, _, err := s.activities.OpenConversationTx(ctx, tx, ch.TenantID, ch.ID, &person, idleTimeout(ch), source)
		if err != nil {
			return fmt.Errorf("open conversation: %w", err)
		}
		for _, m := range byPerson[person] {
			m.conversation = c.ID
		}
	}
	for _, m := range messages {
		if !m.repeat && m.conversation == uuid.Nil {
			c, _, err := s.activities.OpenConversationTx(ctx, tx, ch.TenantID, ch.ID, nil, 0, source)
			if err != nil {
				return fmt.Errorf("open conversation: %w", err)
			}
			m.conversation = c.ID
		}
	}
	return nil
}

// idleTimeout reads conversation_idle_timeout_seconds, which every type's config may have; 0 is never.
func idleTimeout(ch *channel.Channel) time.Duration {
	var c struct {
		Seconds int64 `json:"conversation_idle_timeout_seconds"`
	}
	if json.Unmarshal(ch.Config, &c) != nil { // validated when it was saved
		return 0
	}
	return time.Duration(c.Seconds) * time.Second
}

// new is the activity of a message.
func (m *message) new(ch *channel.Channel) (activity.New, error) {
	n := activity.New{
		ID: m.activityID, TenantID: ch.TenantID, ConversationID: m.conversation, ChannelID: &ch.ID,
		Caller: "channel:" + ch.ID.String(), IdempotencyKey: m.IdempotencyKey,
		Type: m.Type, Sender: cmp.Or(m.Sender, m.external, "external"),
		Author: m.author, Attachments: m.Attachments, ReplyToID: m.ReplyToID, ParticipantExternalID: m.external,
	}
	if m.Text != "" {
		n.Text = &m.Text
	}
	if len(m.Metadata) > 0 {
		b, err := json.Marshal(m.Metadata)
		if err != nil {
			return n, fmt.Errorf("marshal metadata: %w", err)
		}
		n.Metadata = b
	}
	if needsReference(n.Type) && n.ReplyToID == nil {
		// A reaction, edit or deletion of a message that this hub doesn't know is news all the same.
		n.Type = activity.TypeEvent
	}
	return n, nil
}

func needsReference(kind string) bool {
	switch kind {
	case activity.TypeMessageReaction, activity.TypeMessageUpdate, activity.TypeMessageDelete:
		return true
	}
	return false
}
