package http

import (
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/google/uuid"

	"converger/internal/tenants"
)

// registerRangeRoutes: client addresses that are refused, or not counted.
func (s *server) registerRangeRoutes() {
	s.operatorRoute(http.MethodPost, "/address_ranges", bodyJSON, s.createRange)
	s.operatorRoute(http.MethodGet, "/address_ranges", bodyNone, s.listRanges)
	s.operatorRoute(http.MethodGet, "/address_ranges/{range_id}", bodyNone, s.getRange)
	s.operatorRoute(http.MethodPatch, "/address_ranges/{range_id}", bodyJSON, s.updateRange)
	s.operatorRoute(http.MethodDelete, "/address_ranges/{range_id}", bodyNone, s.deleteRange)
}

// denied tells whether the caller's address is in a range that is refused. Probes are answered to everybody: whoever
// restarts nodes by them must not be led to do so by a range. It costs the look-up of the address, and nothing else is read.
func (s *server) denied(c *call) bool {
	c.address = s.Directory.RangeKind(c.ip, c.started)
	return c.address == tenants.RangeDeny && !isProbe(c.r.URL.Path)
}

func isProbe(path string) bool { return strings.HasPrefix(path, "/health/") }

// exempt tells whether the limits that count addresses leave the caller's alone.
func (c *call) exempt() bool { return c.address == tenants.RangeExempt }

type rangeBody struct {
	ID         uuid.UUID         `json:"id"`
	CIDR       netip.Prefix      `json:"cidr"`
	Kind       tenants.RangeKind `json:"kind"`
	Note       string            `json:"note"`
	ExpiresAt  *time.Time        `json:"expires_at"`
	InsertedAt time.Time         `json:"inserted_at"`
	UpdatedAt  time.Time         `json:"updated_at"`
}

func rangeJSON(r tenants.AddressRange) rangeBody {
	return rangeBody{r.ID, r.Prefix, r.Kind, r.Note, utc(r.ExpiresAt), r.InsertedAt.UTC(), r.UpdatedAt.UTC()}
}

func (s *server) createRange(c *call) (*reply, error) {
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	f.require("cidr")
	f.require("kind")
	in := tenants.NewAddressRange{Kind: tenants.RangeKind(f.str("kind")), Note: f.str("note"), ExpiresAt: f.instant("expires_at")}
	text, force := f.str("cidr"), f.flag("force")
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	if in.Prefix, err = tenants.ParseRange("/cidr", text); err != nil {
		return nil, err
	}
	r, err := s.Tenants.CreateAddressRange(c.ctx(), c.actor(), in, tenants.Caller{Addr: c.ip, Force: force})
	if err != nil {
		return nil, err
	}
	s.changed(c)
	p, err := settingReply(c, http.StatusCreated, r.Version, rangeJSON(r))
	if err != nil {
		return nil, err
	}
	return p.with("Location", managementPrefix+"/address_ranges/"+r.ID.String()), nil
}

// listRanges lists all, those of a kind, or those that have an address in them.
func (s *server) listRanges(c *call) (*reply, error) {
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	var f tenants.AddressRangeFilter
	switch f.Kind = tenants.RangeKind(q.Get("kind")); f.Kind {
	case "", tenants.RangeDeny, tenants.RangeExempt:
	default:
		return nil, newProblem(codeInvalidParameter, "Invalid kind: it must be deny or exempt.")
	}
	if text := q.Get("address"); text != "" {
		addr, err := netip.ParseAddr(text)
		if err != nil || addr.Zone() != "" {
			return nil, newProblem(codeInvalidParameter, "Invalid address: it must be an IP address.")
		}
		f.Contains = addr.Unmap()
	}
	list := []string{"address_ranges", string(f.Kind), f.Contains.String()}
	after, err := s.cursors.decode(q.Get("cursor"), list...)
	if err != nil {
		return nil, err
	}
	limit := pageLimit(q, defaultPage, maxPage)
	found, err := s.Tenants.ListAddressRanges(c.ctx(), f, after, limit+1)
	if err != nil {
		return nil, err
	}
	next := ""
	if len(found) > limit {
		found = found[:limit]
		next = s.cursors.encode(found[limit-1].ID, list...)
	}
	bodies := make([]rangeBody, len(found))
	for i, r := range found {
		bodies[i] = rangeJSON(r)
	}
	return pageReply(c.r.URL, bodies, limit, next)
}

func (s *server) getRange(c *call) (*reply, error) {
	id, err := c.pathID("range_id")
	if err != nil {
		return nil, err
	}
	r, err := s.Tenants.GetAddressRange(c.ctx(), id)
	if err != nil {
		return nil, err
	}
	return settingReply(c, http.StatusOK, r.Version, rangeJSON(r))
}

// updateRange changes the members that are given. null is not a value of any of them but expires_at, where it means never.
func (s *server) updateRange(c *call) (*reply, error) {
	id, err := c.pathID("range_id")
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	patch := tenants.AddressRangePatch{Kind: (*tenants.RangeKind)(f.optStr("kind")), Note: f.optStr("note"), ExpiresAt: f.instant("expires_at")}
	force := f.flag("force")
	if f.isNull("expires_at") {
		patch.ExpiresAt = new(time.Time)
	}
	f.refuseNull("expires_at")
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	r, err := s.Tenants.UpdateAddressRange(c.ctx(), c.actor(), id, patch, tenants.Caller{Addr: c.ip, Force: force}, expected...)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	return settingReply(c, http.StatusOK, r.Version, rangeJSON(r))
}

// deleteRange takes force from the query: not every proxy passes a body on with DELETE.
func (s *server) deleteRange(c *call) (*reply, error) {
	id, err := c.pathID("range_id")
	if err != nil {
		return nil, err
	}
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	force := q.Get("force") == "true"
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	if err := s.Tenants.DeleteAddressRange(c.ctx(), c.actor(), id, tenants.Caller{Addr: c.ip, Force: force}, expected...); err != nil {
		return nil, err
	}
	s.changed(c)
	return &reply{status: http.StatusNoContent}, nil
}
