package auth

import (
	"context"
	"encoding/hex"
	"errors"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"converger/internal/tenants"
)

const (
	// What strangers cause in the audit log is bounded by these, on each node; the metrics count all.
	refusalRecords      = 60 // a minute
	refusalRecordsBurst = 30
	refusalQueue        = 64 // records that wait to be written
	auditTimeout        = 2 * time.Second
	// leftOutEvery is how often a record says how many were left out, if any were.
	leftOutEvery = time.Minute
)

// Auditor stores records of the audit log; [tenants.Store] is one.
type Auditor interface {
	Audit(ctx context.Context, by tenants.Actor, e tenants.Entry) error
}

// Refusals keeps the audit log's records of what strangers are refused, failed sign-ins among them. A refusal waits for no query: records are written by
// [Refusals.Run], so many a minute at most, and a record a minute says how many were left out. Safe for concurrent use.
type Refusals struct {
	audit     Auditor
	log       *slog.Logger
	cap       *rate.Limiter
	queue     chan refusal
	leftOut   atomic.Int64
	unwritten prometheus.Counter
}

type refusal struct {
	by    tenants.Actor
	entry tenants.Entry
}

// NewRefusals makes an empty one. The error is of the registration of metrics; reg may be nil.
func NewRefusals(a Auditor, reg prometheus.Registerer, l *slog.Logger) (*Refusals, error) {
	r := &Refusals{audit: a, log: l, cap: rate.NewLimiter(rate.Every(time.Minute/refusalRecords), refusalRecordsBurst), queue: make(chan refusal, refusalQueue),
		unwritten: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "converger_audit_left_out_total", Help: "Refusals of strangers, failed sign-ins among them, that are not in the audit log, for there were too many."})}
	if reg != nil {
		if err := reg.Register(r.unwritten); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// OperatorToken notes that an operator token was refused, with the error of [Authenticator.Operator]. text is what was
// presented; of one that nobody issued its digest is recorded. What can't be a token of ours is not.
func (r *Refusals) OperatorToken(d Directory, text string, why error, from netip.Addr, requestID string) {
	hash, err := tenants.ParseOperatorToken(text)
	if err != nil {
		return
	}
	reason := "unknown"
	switch {
	case errors.Is(why, ErrExpired):
		reason = "expired"
	case errors.Is(why, ErrRevoked):
		reason = "revoked"
	}
	e := tenants.Entry{Action: "refused", ResourceType: "operator_token", ResourceID: hex.EncodeToString(hash[:8]),
		After: map[string]any{"reason": reason, "address": from.Unmap().WithZone("").String()}}
	if t, ok := d.OperatorToken(hash); ok && t.ID != uuid.Nil {
		e.ResourceID = t.ID.String()
	}
	r.Record(tenants.Actor{Type: tenants.ActorSystem, ID: "authentication", RequestID: requestID}, e)
}

// Record has a refusal written, or counts it as left out: all kinds of them share what strangers may cause.
func (r *Refusals) Record(by tenants.Actor, e tenants.Entry) {
	if r.cap.Allow() {
		select {
		case r.queue <- refusal{by, e}:
			return
		default:
		}
	}
	r.leftOut.Add(1)
	r.unwritten.Inc()
}

// Run writes until ctx ends, and then what waits. It returns nil: what can't be written is logged.
func (r *Refusals) Run(ctx context.Context) error {
	tick := time.NewTicker(leftOutEvery)
	defer tick.Stop()
	for {
		select {
		case x := <-r.queue:
			r.write(context.WithoutCancel(ctx), x)
		case <-tick.C:
			r.sayLeftOut(context.WithoutCancel(ctx))
		case <-ctx.Done():
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), auditTimeout)
			defer cancel()
			r.writeQueue(ctx)
			r.sayLeftOut(ctx)
			return nil
		}
	}
}

// writeQueue writes what waits.
func (r *Refusals) writeQueue(ctx context.Context) {
	for {
		select {
		case x := <-r.queue:
			r.write(ctx, x)
		default:
			return
		}
	}
}

func (r *Refusals) sayLeftOut(ctx context.Context) {
	if n := r.leftOut.Swap(0); n > 0 {
		r.write(ctx, refusal{tenants.Actor{Type: tenants.ActorSystem, ID: "authentication"}, tenants.Entry{
			Action: "left_out", ResourceType: "audit_log", ResourceID: "refusals", After: map[string]any{"records": n}}})
	}
}

func (r *Refusals) write(ctx context.Context, x refusal) {
	ctx, cancel := context.WithTimeout(ctx, auditTimeout)
	defer cancel()
	if err := r.audit.Audit(ctx, x.by, x.entry); err != nil {
		r.log.ErrorContext(ctx, "a refusal is not in the audit log", "action", x.entry.Action, "error", err)
	}
}
