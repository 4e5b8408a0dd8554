package http

import (
	"net/http"
	"strings"
	"time"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

// registerPortalRoutes: the pages of a tenant's staff. Whose things they show comes from the session, never from the
// request.
func (s *server) registerPortalRoutes() {
	s.registerSignInRoutes(areaPortal, credentialPortal)
	page := route{method: http.MethodGet, area: areaPortal, auth: credentialPortal, bucket: ratelimit.WebPage}
	s.register(page.at(areaPortal.home(), s.showPortal))
}

// portalView is the first page of the portal.
type portalView struct {
	Tenant      string
	Channels    []portalChannel
	First, Next string // addresses of pages of channels, "" for none
	Keys        []portalKey
	Limits      []limitView
}

type portalChannel struct {
	ID                         uuid.UUID
	Name, Direction, RateLimit string
	Type                       channel.Type
	Status                     channel.Status
	Added                      time.Time
}

type portalKey struct {
	Name, Prefix, Scopes, State, Class string
	Until, LastUsed                    *time.Time
	Added                              time.Time
}

// directions are a channel's modes as seen from the hub.
var directions = map[channel.Mode]string{channel.ModeInbound: "in", channel.ModeOutbound: "out", channel.ModeDuplex: "in and out"}

func (s *server) showPortal(c *call) (*reply, error) {
	id := c.Tenant.ID
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	list := []string{"portal channels", id.String()}
	after, err := s.cursors.decode(q.Get("cursor"), list...)
	if err != nil {
		return nil, err
	}
	found, err := s.Channels.List(c.ctx(), id, after, defaultPage+1)
	if err != nil {
		return nil, err
	}
	keys, err := s.Tenants.ListKeys(c.ctx(), id)
	if err != nil {
		return nil, err
	}
	v := portalView{Tenant: c.Tenant.Name}
	if after != uuid.Nil {
		v.First = areaPortal.home()
	}
	if len(found) > defaultPage {
		found = found[:defaultPage]
		v.Next = areaPortal.home() + "?cursor=" + s.cursors.encode(found[defaultPage-1].ID, list...)
	}
	for _, ch := range found {
		v.Channels = append(v.Channels, portalChannel{
			ID: ch.ID, Name: ch.Name, Type: ch.Type, Direction: directions[ch.Mode], Status: ch.Status, RateLimit: ch.RateLimit, Added: ch.InsertedAt})
	}
	for _, k := range keys {
		v.Keys = append(v.Keys, keyView(k, c.started))
	}
	for _, b := range ratelimit.Buckets() {
		if b.Info().TenantOverride {
			v.Limits = append(v.Limits, s.limitView(c.Tenant, b))
		}
	}
	return s.page(c, http.StatusOK, "portal.html", view{Title: "Overview", Main: v})
}

func keyView(k tenants.APIKey, now time.Time) portalKey {
	v := portalKey{
		Name: k.Name, Prefix: k.Prefix + "…", Scopes: strings.Join(k.Scopes, ", "), State: "active", Class: "good",
		LastUsed: k.LastUsedAt, Added: k.InsertedAt,
	}
	switch {
	case k.RevokedAt != nil && !k.RevokedAt.After(now):
		v.State, v.Class = "revoked", "off"
	case k.ExpiresAt != nil && !k.ExpiresAt.After(now):
		v.State, v.Class = "expired", "off"
	case k.RevokedAt != nil:
		v.State, v.Class, v.Until = "revoked from", "warn", k.RevokedAt
	case k.ExpiresAt != nil:
		v.State, v.Until = "until", k.ExpiresAt
	}
	return v
}

// browserName says what kind of browser a session is in, as far as its own words tell: a label, nothing to go by.
func browserName(userAgent string) string {
	name, system := "", ""
	for _, known := range [][2]string{{"Edg/", "Edge"}, {"OPR/", "Opera"}, {"Firefox/", "Firefox"}, {"Chrome/", "Chrome"}, {"Safari/", "Safari"}} {
		if strings.Contains(userAgent, known[0]) {
			name = known[1]
			break
		}
	}
	for _, known := range [][2]string{{"Android", "Android"}, {"iPhone", "iPhone"}, {"iPad", "iPad"}, {"Windows", "Windows"}, {"Mac OS X", "macOS"}, {"Linux", "Linux"}} {
		if strings.Contains(userAgent, known[0]) {
			system = known[1]
			break
		}
	}
	switch {
	case name == "" && userAgent == "":
		return "Unknown browser"
	case name == "":
		return truncate(userAgent, 40)
	case system == "":
		return name
	}
	return name + " on " + system
}
