package tenants

import (
	"encoding/binary"
	"encoding/json"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
)

// Deriver computes what callers want ready beside each entry (hashed limiter keys, compiled overrides). It is called
// once for each (re)loaded entry, before the entry is visible, and must not call the Directory. The results stay in
// the entry's Derived.
type Deriver interface {
	Tenant(*TenantEntry) any
	Channel(*ChannelEntry) any
	OperatorToken(*OperatorEntry) any
}

// TenantEntry is what a node knows of a tenant. Entries are immutable; a change makes a new one.
type TenantEntry struct {
	ID          ID
	Name        string
	Status      Status
	Limits      json.RawMessage // as [Tenant.Limits]
	MaxInFlight int
	UploadTypes []string // as [Tenant.UploadTypes]
	Version     int64
	Derived     any
}

// KeyEntry is what a node knows of an API key.
type KeyEntry struct {
	ID        uuid.UUID
	TenantID  ID
	Tenant    *TenantEntry // the newest at the time of the lookup, never nil
	Name      string
	Scopes    Scopes
	ExpiresAt time.Time // zero: never
	RevokedAt time.Time // zero: never
	Version   int64

	hash [32]byte
}

// Usable returns nil, [ErrKeyRevoked] or [ErrKeyExpired].
func (k *KeyEntry) Usable(now time.Time) error { return usable(now, k.ExpiresAt, k.RevokedAt) }

// ChannelEntry is what a node knows of a channel; deleted ones are not in the directory.
type ChannelEntry struct {
	ID                 uuid.UUID
	TenantID           ID
	Type, Mode, Status string
	RequireSignature   bool
	Ordered            bool
	RateLimit          string // as stored; "" none
	Version            int64
	SecretHash         [32]byte
	PreviousSecretHash [32]byte // zero: none
	PreviousUntil      time.Time
	Derived            any
}

// OperatorEntry is what a node knows of an operator token.
type OperatorEntry struct {
	ID        uuid.UUID
	Name      string
	Scopes    Scopes
	ExpiresAt time.Time // zero: never
	RevokedAt time.Time // zero: never
	Version   int64
	Derived   any

	hash [32]byte
}

// ruleEntry is what a node knows of an enabled routing rule; disabled ones are not in the directory.
type ruleEntry struct {
	id      uuid.UUID
	source  uuid.UUID
	targets []uuid.UUID
}

// routeEntry is what the enabled rules of one source channel come to. It always has a rule.
type routeEntry struct {
	source  uuid.UUID
	rules   []*ruleEntry
	targets []uuid.UUID // of all rules, each once
}

// Usable returns nil, [ErrKeyRevoked] or [ErrKeyExpired].
func (t *OperatorEntry) Usable(now time.Time) error { return usable(now, t.ExpiresAt, t.RevokedAt) }

func usable(now, expires, revoked time.Time) error {
	switch {
	case !revoked.IsZero() && !now.Before(revoked):
		return ErrKeyRevoked
	case !expires.IsZero() && !now.Before(expires):
		return ErrKeyExpired
	}
	return nil
}

// entrySet is everything a directory holds, found by what requests bring.
type entrySet struct {
	tenants   *index[ID, TenantEntry]
	names     *index[string, nameEntry]
	keys      *index[[32]byte, KeyEntry]
	channels  *index[uuid.UUID, ChannelEntry]
	secrets   *index[[32]byte, ChannelEntry] // by the current secret
	previous  *index[[32]byte, ChannelEntry] // by the previous secret, of those that have one
	operators *index[[32]byte, OperatorEntry]
	rules     *index[uuid.UUID, ruleEntry]
	routes    *index[uuid.UUID, routeEntry] // by the source channel

	ranges    map[uuid.UUID]*rangeEntry // only the writer looks
	addresses atomic.Pointer[addressRanges]
}

func newEntrySet(r changedRows) *entrySet {
	return &entrySet{
		tenants:   newIndex(len(r.tenants), func(t *TenantEntry) ID { return t.ID }, idSpot),
		names:     newIndex(len(r.tenants), func(n *nameEntry) string { return n.canonical }, nameSpot),
		keys:      newIndex(len(r.keys), func(k *KeyEntry) [32]byte { return k.hash }, hashSpot),
		channels:  newIndex(len(r.channels), func(c *ChannelEntry) uuid.UUID { return c.ID }, idSpot),
		secrets:   newIndex(len(r.channels), func(c *ChannelEntry) [32]byte { return c.SecretHash }, hashSpot),
		previous:  newIndex(0, func(c *ChannelEntry) [32]byte { return c.PreviousSecretHash }, hashSpot),
		operators: newIndex(len(r.operators), func(t *OperatorEntry) [32]byte { return t.hash }, hashSpot),
		rules:     newIndex(len(r.rules), func(r *ruleEntry) uuid.UUID { return r.id }, idSpot),
		routes:    newIndex(0, func(r *routeEntry) uuid.UUID { return r.source }, idSpot),
		ranges:    make(map[uuid.UUID]*rangeEntry, len(r.ranges)),
	}
}

// idSpot takes the low bits of a UUID's tail, the random end of a version 7.
func idSpot(id uuid.UUID) uint64 { return binary.BigEndian.Uint64(id[8:]) }

func hashSpot(h [32]byte) uint64 { return binary.BigEndian.Uint64(h[:8]) }

// apply brings the set up to date, row by row, beside readers: what changed is replaced in place, so that no lookup of
// an unchanged or merely edited row ever misses it. Tenants come first, so that a suspension is seen with or before
// anything else of its transaction.
func (s *entrySet) apply(r changedRows, derive Deriver) {
	changed := make(map[ID]*TenantEntry)
	for _, t := range r.tenants {
		if derive != nil {
			t.Derived = derive.Tenant(t)
		}
		old, known := s.tenants.get(t.ID)
		if known {
			changed[t.ID] = t
		}
		s.tenants.put(t)
		s.rename(old, t)
	}
	if len(changed) > 0 {
		for k := range s.keys.all() {
			if t, ok := changed[k.TenantID]; ok {
				moved := *k
				moved.Tenant = t
				s.keys.put(&moved)
			}
		}
	}
	for _, k := range r.keys {
		// The foreign key and the one snapshot promise the tenant; a key without it would not be usable.
		if t, ok := s.tenants.get(k.entry.TenantID); ok && !k.gone {
			k.entry.Tenant = t
			s.keys.put(k.entry)
		} else {
			s.keys.remove(k.entry.hash)
		}
	}
	for _, c := range r.channels {
		s.applyChannel(c.entry, c.gone, derive)
	}
	for _, rule := range r.rules {
		s.applyRule(rule.entry, rule.gone)
	}
	for _, t := range r.operators {
		if t.gone {
			s.operators.remove(t.entry.hash)
			continue
		}
		if derive != nil {
			t.entry.Derived = derive.OperatorToken(t.entry)
		}
		s.operators.put(t.entry)
	}
	s.applyRanges(r.ranges)
}

// applyRanges makes the table of address ranges anew and replaces it whole: a reader sees it from before the changes, or
// from after all of them.
func (s *entrySet) applyRanges(changed []changedRow[rangeEntry]) {
	if len(changed) == 0 {
		return
	}
	for _, r := range changed {
		if r.gone {
			delete(s.ranges, r.entry.id)
		} else {
			s.ranges[r.entry.id] = r.entry
		}
	}
	s.addresses.Store(newAddressRanges(slices.Collect(maps.Values(s.ranges))))
}

// applyChannel puts the new entry under all its keys before it takes away those of the old one: a secret that moves from
// current to previous is never unknown in between. Another channel may have taken over an old secret; it stays.
func (s *entrySet) applyChannel(c *ChannelEntry, gone bool, derive Deriver) {
	old, known := s.channels.get(c.ID)
	if gone {
		s.channels.remove(c.ID)
		c = &ChannelEntry{ID: c.ID}
	} else {
		if derive != nil {
			c.Derived = derive.Channel(c)
		}
		s.channels.put(c)
		s.secrets.put(c)
		if c.PreviousSecretHash != ([32]byte{}) {
			s.previous.put(c)
		}
	}
	if !known {
		return
	}
	if holder, ok := s.secrets.get(old.SecretHash); ok && holder.ID == c.ID && old.SecretHash != c.SecretHash {
		s.secrets.remove(old.SecretHash)
	}
	if holder, ok := s.previous.get(old.PreviousSecretHash); ok && holder.ID == c.ID && old.PreviousSecretHash != c.PreviousSecretHash {
		s.previous.remove(old.PreviousSecretHash)
	}
}

// applyRule replaces, adds or takes away one rule. Routes are made anew and replaced whole: a reader sees all the targets
// from before the change of a rule, or all from after it.
func (s *entrySet) applyRule(rule *ruleEntry, gone bool) {
	old, known := s.rules.get(rule.id)
	if gone {
		s.rules.remove(rule.id)
	} else {
		s.rules.put(rule)
		s.reroute(rule.source, rule.id, rule)
	}
	if known && (gone || old.source != rule.source) {
		s.reroute(old.source, rule.id, nil)
	}
}

// reroute makes the route of a source with one rule replaced, added, or, for a nil rule, taken away.
func (s *entrySet) reroute(source, id uuid.UUID, rule *ruleEntry) {
	route := &routeEntry{source: source}
	if old, ok := s.routes.get(source); ok {
		for _, r := range old.rules {
			if r.id != id {
				route.rules = append(route.rules, r)
			}
		}
	}
	if rule != nil {
		route.rules = append(route.rules, rule)
	}
	if len(route.rules) == 0 {
		s.routes.remove(source)
		return
	}
	seen := make(map[uuid.UUID]struct{})
	for _, r := range route.rules {
		for _, t := range r.targets {
			if _, twice := seen[t]; !twice {
				seen[t] = struct{}{}
				route.targets = append(route.targets, t)
			}
		}
	}
	s.routes.put(route)
}
