package channel

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/singleflight"

	"converger/internal/tenants"
)

// maxCurrent bounds the channels that Current holds in clear, at a few kilobytes each. With more channels in use at one
// time some are read again, which costs a query each.
const maxCurrent = 10_000

// loadTimeout bounds a shared read, which outlives the caller that began it.
const loadTimeout = 5 * time.Second

// currentCache holds the newest version seen of each channel. The zero value is ready.
type currentCache struct {
	mu      sync.RWMutex
	byID    map[uuid.UUID]*Channel
	flights singleflight.Group
}

func (c *currentCache) get(tenant tenants.ID, id uuid.UUID, version int64) (*Channel, bool) {
	c.mu.RLock()
	ch := c.byID[id]
	c.mu.RUnlock()
	if ch == nil || ch.TenantID != tenant || ch.Version < version {
		return nil, false
	}
	return ch, true
}

// put keeps ch unless a newer version is there.
func (c *currentCache) put(ch *Channel) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byID == nil {
		c.byID = make(map[uuid.UUID]*Channel)
	}
	old, ok := c.byID[ch.ID]
	if ok && old.Version >= ch.Version {
		return
	}
	if !ok && len(c.byID) >= maxCurrent {
		for id := range c.byID { // any: the order of a map is random enough
			delete(c.byID, id)
			break
		}
	}
	c.byID[ch.ID] = ch
}

// forget drops a channel of the tenant: another tenant's question must not empty the cache.
func (c *currentCache) forget(tenant tenants.ID, id uuid.UUID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ch := c.byID[id]; ch != nil && ch.TenantID == tenant {
		delete(c.byID, id)
	}
}

// Current returns a channel that is at least as new as version, which the caller has from its directory: mostly from
// memory, else by one query that concurrent callers share. The channel is shared, read it only. Errors: ErrNotFound (no
// such channel, deleted, or another tenant's).
//
// A deleted channel may be served from memory by a node that asks with a version from before; the directory, which has
// to be asked first, stops finding it.
func (s *Store) Current(ctx context.Context, tenant tenants.ID, id uuid.UUID, version int64) (*Channel, error) {
	if ch, ok := s.current.get(tenant, id, version); ok {
		return ch, nil
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	// The version is part of the key: a read that began for an older version may have seen the older row.
	key := fmt.Sprintf("%s/%s/%d", tenant, id, version)
	result := s.current.flights.DoChan(key, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), loadTimeout)
		defer cancel()
		ch, err := s.Get(ctx, tenant, id)
		if err != nil {
			if errors.Is(err, ErrNotFound) {
				s.current.forget(tenant, id)
			}
			return nil, err
		}
		if ch.Version < version {
			return nil, fmt.Errorf("channel %s: version %d asked for, the database has %d", id, version, ch.Version)
		}
		s.current.put(&ch)
		return &ch, nil
	})
	select {
	case r := <-result:
		if r.Err != nil {
			return nil, r.Err
		}
		return r.Val.(*Channel), nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
