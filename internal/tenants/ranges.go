package tenants

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/fault"
	"converger/internal/postgres"
)

// RangeKind is what is done with the requests of a range's addresses.
type RangeKind string

// The kinds. An address that is in several ranges belongs to the one with the longest prefix.
const (
	RangeDeny   RangeKind = "deny"   // refused, but for the health probes
	RangeExempt RangeKind = "exempt" // not counted by the limits whose subject is an address
)

// AddressRange is a range of client addresses that is treated in its own way.
type AddressRange struct {
	ID         uuid.UUID
	Prefix     netip.Prefix // masked; IPv4-mapped IPv6 as IPv4
	Kind       RangeKind
	Note       string     // why, for people; at most 500 characters
	ExpiresAt  *time.Time // nil: never
	Version    int64
	InsertedAt time.Time
	UpdatedAt  time.Time
}

// NewAddressRange is the input of [Store.CreateAddressRange].
type NewAddressRange struct {
	Prefix    netip.Prefix // see [ParseRange]
	Kind      RangeKind
	Note      string
	ExpiresAt *time.Time // in the future; nil: never
}

// AddressRangePatch is a change; nil members stay as they are. The range of addresses itself does not change.
type AddressRangePatch struct {
	Kind      *RangeKind
	Note      *string
	ExpiresAt *time.Time // in the future; the zero time: never
}

// AddressRangeFilter narrows a list; zero members take everything.
type AddressRangeFilter struct {
	Kind     RangeKind
	Contains netip.Addr // only ranges with this address in them
}

// Caller guards the changes of address ranges against mistakes of whoever makes them.
type Caller struct {
	Addr  netip.Addr // from which the change comes; the zero Addr: not from an address
	Force bool       // the caller has been told, and means it
}

var (
	// ErrRangeExists means that there is a range of just these addresses.
	ErrRangeExists = errors.New("there is a range of just these addresses")
	// ErrTooManyRanges means that there are [MaxAddressRanges] already.
	ErrTooManyRanges = errors.New("too many address ranges")
	// ErrWouldDeny means that the change would refuse the address from which it comes.
	ErrWouldDeny = errors.New("would deny the address of the caller")
)

// MaxAddressRanges is how many address ranges there can be: all nodes hold all of them in memory.
const MaxAddressRanges = 10_000

const maxNoteChars = 500 // as the migration checks

const (
	rangeColumns = `id, cidr, kind, note, expires_at, version, inserted_at, updated_at`

	countRangesQuery = `SELECT count(*) FROM address_ranges WHERE deleted_at IS NULL`
	// What has expired gives way to a new range of the same addresses.
	replaceRangeQuery = `
UPDATE address_ranges SET deleted_at = now(), version = $2 WHERE cidr = $1 AND deleted_at IS NULL AND expires_at <= now()`
	insertRangeQuery = `
INSERT INTO address_ranges (id, cidr, kind, note, expires_at, version)
VALUES ($1, $2, $3, $4, $5, $6) RETURNING ` + rangeColumns
	getRangeQuery   = `SELECT ` + rangeColumns + ` FROM address_ranges WHERE id = $1 AND deleted_at IS NULL`
	listRangesQuery = `
SELECT ` + rangeColumns + ` FROM address_ranges
WHERE id > $1 AND deleted_at IS NULL AND ($2::text = '' OR kind = $2) AND ($3::inet IS NULL OR cidr >>= $3) ORDER BY id LIMIT $4`
	updateRangeQuery = `
UPDATE address_ranges SET kind = $2, note = $3, expires_at = $4, version = $5, updated_at = now()
WHERE id = $1 RETURNING ` + rangeColumns
	deleteRangeQuery = `UPDATE address_ranges SET deleted_at = now(), updated_at = now(), version = $2 WHERE id = $1`

	// Which range decides for an address, as [Directory.RangeKind] finds it.
	decidingRangeQuery = `
SELECT kind FROM address_ranges
WHERE cidr >>= $1::inet AND deleted_at IS NULL AND (expires_at IS NULL OR expires_at > now())
ORDER BY masklen(cidr) DESC LIMIT 1`

	constraintRangeCIDR = "address_ranges_cidr_key"
)

// ParseRange reads a range in CIDR notation, or a single address. IPv4-mapped IPv6 becomes IPv4, as the addresses of
// callers do. Its error is a [*fault.Invalid] for the member at pointer; text with bits behind the prefix is refused, with
// the range that it may have meant.
func ParseRange(pointer, text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		addr, e := netip.ParseAddr(text)
		if e != nil || addr.Zone() != "" {
			return netip.Prefix{}, fault.Invalidf(pointer, fault.Malformed, "must be a range such as 203.0.113.0/24 or 2001:db8::/32, or an address")
		}
		p = netip.PrefixFrom(addr, addr.BitLen())
	}
	if masked := p.Masked(); masked != p {
		return netip.Prefix{}, fault.Invalidf(pointer, fault.Malformed, "has bits set behind its prefix; did you mean %s or %s/%d?",
			masked, p.Addr(), p.Addr().BitLen())
	}
	if p.Addr().Is4In6() { // masked, so its prefix has the 96 bits
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p, nil
}

// CreateAddressRange makes a range. It returns a [*fault.Invalid], [ErrRangeExists], [ErrTooManyRanges] or, without
// caller.Force, [ErrWouldDeny].
func (s *Store) CreateAddressRange(ctx context.Context, by Actor, n NewAddressRange, caller Caller) (AddressRange, error) {
	var bad fault.Invalid
	checkRange(&bad, n.Kind, n.Note)
	checkRangeExpiry(&bad, n.ExpiresAt)
	switch {
	case !n.Prefix.IsValid():
		bad.Addf("/cidr", fault.Required, "is required")
	case n.Prefix.Bits() == 0 && !caller.Force:
		bad.Addf("/cidr", fault.OutOfRange, `is every address there is; if you mean that, send "force": true`)
	}
	if err := bad.Err(); err != nil {
		return AddressRange{}, err
	}
	id, err := uuid.NewV7()
	if err != nil {
		return AddressRange{}, fmt.Errorf("create address range: %w", err)
	}
	var r AddressRange
	err = s.change(ctx, "create address range", func(tx pgx.Tx, version int64) error {
		if _, err := tx.Exec(ctx, replaceRangeQuery, n.Prefix, version); err != nil {
			return err
		}
		count, err := postgres.One(ctx, tx, ErrNotFound, pgx.RowTo[int], countRangesQuery)
		if err != nil {
			return err
		}
		if count >= MaxAddressRanges {
			return ErrTooManyRanges
		}
		r, err = postgres.One(ctx, tx, ErrNotFound, scanRange, insertRangeQuery, id, n.Prefix, n.Kind, n.Note, n.ExpiresAt, version)
		if postgres.Constraint(err) == constraintRangeCIDR {
			return ErrRangeExists
		}
		if err != nil {
			return err
		}
		if err := checkCallerTx(ctx, tx, caller); err != nil {
			return err
		}
		return AuditTx(ctx, tx, by, Entry{Action: "create", ResourceType: "address_range", ResourceID: id.String(), After: rangeSnapshot(r)})
	})
	if err != nil {
		return AddressRange{}, err
	}
	return r, nil
}

// GetAddressRange returns one range, or [ErrNotFound].
func (s *Store) GetAddressRange(ctx context.Context, id uuid.UUID) (AddressRange, error) {
	r, err := postgres.One(ctx, s.pool, ErrNotFound, scanRange, getRangeQuery, id)
	if err != nil {
		return AddressRange{}, fmt.Errorf("get address range: %w", err)
	}
	return r, nil
}

// ListAddressRanges returns up to limit ranges by ascending id, also expired ones, those after the given id ([uuid.Nil]:
// from the start).
func (s *Store) ListAddressRanges(ctx context.Context, f AddressRangeFilter, after uuid.UUID, limit int) ([]AddressRange, error) {
	var contains *netip.Addr
	if f.Contains.IsValid() {
		contains = &f.Contains
	}
	list, err := postgres.Many(ctx, s.pool, scanRange, listRangesQuery, after, f.Kind, contains, limit)
	if err != nil {
		return nil, fmt.Errorf("list address ranges: %w", err)
	}
	return list, nil
}

// UpdateAddressRange changes a range. It returns a [*fault.Invalid], [ErrNotFound] or, without caller.Force, [ErrWouldDeny].
func (s *Store) UpdateAddressRange(ctx context.Context, by Actor, id uuid.UUID, patch AddressRangePatch, caller Caller, expected ...int64) (AddressRange, error) {
	var r AddressRange
	err := s.change(ctx, "update address range", func(tx pgx.Tx, version int64) error {
		before, err := postgres.One(ctx, tx, ErrNotFound, scanRange, getRangeQuery, id)
		if err != nil {
			return err
		}
		if err := CheckVersion(before.Version, expected); err != nil {
			return err
		}
		r = before
		if patch.Kind != nil {
			r.Kind = *patch.Kind
		}
		if patch.Note != nil {
			r.Note = *patch.Note
		}
		var bad fault.Invalid
		checkRange(&bad, r.Kind, r.Note)
		switch at := patch.ExpiresAt; {
		case at == nil:
		case at.IsZero():
			r.ExpiresAt = nil
		default:
			checkRangeExpiry(&bad, at)
			r.ExpiresAt = at
		}
		if err := bad.Err(); err != nil {
			return err
		}
		if r, err = postgres.One(ctx, tx, ErrNotFound, scanRange, updateRangeQuery, id, r.Kind, r.Note, r.ExpiresAt, version); err != nil {
			return err
		}
		if err := checkCallerTx(ctx, tx, caller); err != nil {
			return err
		}
		return AuditTx(ctx, tx, by, Entry{Action: "update", ResourceType: "address_range", ResourceID: id.String(),
			Before: rangeSnapshot(before), After: rangeSnapshot(r)})
	})
	if err != nil {
		return AddressRange{}, err
	}
	return r, nil
}

// DeleteAddressRange removes a range. It returns [ErrNotFound], also for a second time, or, without caller.Force,
// [ErrWouldDeny]: the range may have excepted the caller from a wider one.
func (s *Store) DeleteAddressRange(ctx context.Context, by Actor, id uuid.UUID, caller Caller, expected ...int64) error {
	return s.change(ctx, "delete address range", func(tx pgx.Tx, version int64) error {
		before, err := postgres.One(ctx, tx, ErrNotFound, scanRange, getRangeQuery, id)
		if err != nil {
			return err
		}
		if err := CheckVersion(before.Version, expected); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, deleteRangeQuery, id, version); err != nil {
			return err
		}
		if err := checkCallerTx(ctx, tx, caller); err != nil {
			return err
		}
		return AuditTx(ctx, tx, by, Entry{Action: "delete", ResourceType: "address_range", ResourceID: id.String(), Before: rangeSnapshot(before)})
	})
}

// checkCallerTx looks at what the change has left behind.
func checkCallerTx(ctx context.Context, tx pgx.Tx, caller Caller) error {
	if caller.Force || !caller.Addr.IsValid() {
		return nil
	}
	kind, err := postgres.One(ctx, tx, ErrNotFound, pgx.RowTo[RangeKind], decidingRangeQuery, caller.Addr)
	switch {
	case errors.Is(err, ErrNotFound):
		return nil
	case err != nil:
		return err
	case kind == RangeDeny:
		return ErrWouldDeny
	}
	return nil
}

func checkRange(bad *fault.Invalid, kind RangeKind, note string) {
	if kind != RangeDeny && kind != RangeExempt {
		bad.Addf("/kind", fault.UnknownValue, "must be %q or %q", RangeDeny, RangeExempt)
	}
	if !utf8.ValidString(note) || strings.ContainsFunc(note, unicode.IsControl) {
		bad.Addf("/note", fault.Malformed, "must be UTF-8 without control characters")
	} else if utf8.RuneCountInString(note) > maxNoteChars {
		bad.Addf("/note", fault.TooLong, "must have at most %d characters", maxNoteChars)
	}
}

func checkRangeExpiry(bad *fault.Invalid, at *time.Time) {
	if at != nil && !at.After(time.Now()) {
		bad.Addf("/expires_at", fault.OutOfRange, "must be in the future")
	}
}

func rangeSnapshot(r AddressRange) any {
	return map[string]any{"cidr": r.Prefix, "kind": r.Kind, "note": r.Note, "expires_at": r.ExpiresAt}
}

func scanRange(row pgx.CollectableRow) (AddressRange, error) {
	var r AddressRange
	err := row.Scan(&r.ID, &r.Prefix, &r.Kind, &r.Note, &r.ExpiresAt, &r.Version, &r.InsertedAt, &r.UpdatedAt)
	r.ExpiresAt, r.InsertedAt, r.UpdatedAt = utc(r.ExpiresAt), r.InsertedAt.UTC(), r.UpdatedAt.UTC()
	return r, err
}
