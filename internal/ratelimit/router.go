package ratelimit

import (
	"context"
	"errors"
	"slices"
	"time"
)

// Backend names a kind of Store, as configuration does.
type Backend string

// The backends.
const (
	BackendLocal   Backend = "local"   // this node's memory
	BackendCluster Backend = "cluster" // every node's memory, with reports between them
	BackendOwner   Backend = "owner"   // the memory of one node for each key
	BackendRedis   Backend = "redis"   // a Redis server
)

// ParseBackend reads the name of a backend.
func ParseBackend(name string) (Backend, bool) {
	return Backend(name), slices.Contains(backends, name)
}

var backends = []string{string(BackendLocal), string(BackendCluster), string(BackendOwner), string(BackendRedis)}

// Router is a Store in which each bucket has a store of its own choice.
type Router struct {
	stores   [NumBuckets]Store
	distinct []Store
}

var _ Store = (*Router)(nil)

// NewRouter asks choose once for every bucket.
func NewRouter(choose func(Bucket) Store) *Router {
	r := &Router{}
	for _, b := range Buckets() {
		s := choose(b)
		r.stores[b] = s
		if !slices.Contains(r.distinct, s) {
			r.distinct = append(r.distinct, s)
		}
	}
	return r
}

func (r *Router) of(it Item) Store { return r.stores[it.Policy.bucket] }

// Backend implements Store.
func (r *Router) Backend(b Bucket) string { return r.stores[b].Backend(b) }

// Take implements Store.
func (r *Router) Take(ctx context.Context, now Instant, it Item) Decision {
	return r.of(it).Take(ctx, now, it)
}

// TakeAll implements Store. Items of several stores are spent store by store; when
// one refuses, the others get back what they had admitted.
func (r *Router) TakeAll(ctx context.Context, now Instant, items []Item) Decision {
	first := r.of(items[0])
	if !slices.ContainsFunc(items, func(it Item) bool { return r.of(it) != first }) {
		return first.TakeAll(ctx, now, items)
	}
	type part struct {
		items []Item
		index []uint8
		d     Decision // of its items
	}
	var parts []*part
	for i, it := range items {
		n := slices.IndexFunc(parts, func(p *part) bool { return r.of(p.items[0]) == r.of(it) })
		if n < 0 {
			n = len(parts)
			parts = append(parts, &part{})
		}
		parts[n].items, parts[n].index = append(parts[n].items, it), append(parts[n].index, uint8(i))
	}
	var strictest Decision
	at, alone := now, uint32(0)
	for n, p := range parts {
		p.d = r.of(p.items[0]).TakeAll(ctx, now, p.items)
		d := p.d.AsPart(p.index)
		if n == 0 || d.Stricter(strictest) {
			strictest = d
		}
		at, alone = max(at, d.At), alone|d.Alone
	}
	if !strictest.Allowed {
		for _, p := range parts {
			if p.d.Allowed {
				for i, it := range p.items {
					r.of(it).Refund(ctx, p.d.Booking(i), it)
				}
			}
		}
	}
	strictest.At, strictest.Alone = at, alone
	return strictest
}

// Refund implements Store.
func (r *Router) Refund(ctx context.Context, b Booking, it Item) { r.of(it).Refund(ctx, b, it) }

// Reserve implements Store.
func (r *Router) Reserve(ctx context.Context, now Instant, it Item, maxWait time.Duration) Decision {
	return r.of(it).Reserve(ctx, now, it, maxWait)
}

// Peek implements Store.
func (r *Router) Peek(ctx context.Context, now Instant, it Item) (Usage, error) {
	return r.of(it).Peek(ctx, now, it)
}

// States implements Reporter.
func (r *Router) States(now Instant) []StoreState {
	var all []StoreState
	for _, s := range r.distinct {
		all = append(all, statesOf(s, now)...)
	}
	return all
}

// Own implements Reporter.
func (r *Router) Own(now Instant, it Item) (used uint32, ok bool) { return ownOf(r.of(it), now, it) }

// Reset implements Store: an item without a policy does not tell its bucket, so every store is asked.
func (r *Router) Reset(ctx context.Context, now Instant, it Item) error {
	if it.Policy != nil {
		return r.of(it).Reset(ctx, now, it)
	}
	errs := make([]error, 0, len(r.distinct))
	for _, s := range r.distinct {
		errs = append(errs, s.Reset(ctx, now, it))
	}
	return errors.Join(errs...)
}
