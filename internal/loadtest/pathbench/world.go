package main

import (
	"context"
	"fmt"

	"converger/internal/loadtest/hub"
)

const (
	worldTenants          = 20
	conversationsOfTenant = 50 // on each of its channels
)

type conversation struct {
	id     string
	tenant *hub.Tenant
}

// lanes is a set of conversations and the channels that they belong to.
type lanes struct {
	channels      []string
	conversations []*conversation
}

// world is what the hub is told before the load begins.
type world struct {
	out   lanes // webhook channels that deliver to the fast receiver
	in    lanes // webhook channels that only receive
	noisy lanes // one tenant's channel to the slow endpoint
}

// newWorld makes tenants, keys and channels through the management API and conversations through the tenant API.
func newWorld(ctx context.Context, h *hub.Process, fast, slow string) (*world, error) {
	w := &world{}
	for i := range worldTenants {
		t, err := h.NewTenant(ctx, fmt.Sprintf("bench %02d", i+1))
		if err != nil {
			return nil, err
		}
		if err := w.out.add(ctx, h, t, "duplex", fast, conversationsOfTenant); err != nil {
			return nil, err
		}
		if err := w.in.add(ctx, h, t, "inbound", "", conversationsOfTenant); err != nil {
			return nil, err
		}
	}
	// Callers take conversations in turn: neighbours in the list belong to different tenants.
	hub.Deal(w.out.conversations, conversationsOfTenant)
	hub.Deal(w.in.conversations, conversationsOfTenant)
	t, err := h.NewTenant(ctx, "noisy neighbour")
	if err != nil {
		return nil, err
	}
	return w, w.noisy.add(ctx, h, t, "duplex", slow, noisyLanes)
}

// add makes a channel of t with n conversations.
func (l *lanes) add(ctx context.Context, h *hub.Process, t *hub.Tenant, mode, url string, n int) error {
	made, err := h.NewChannel(ctx, t, mode, mode, url)
	if err != nil {
		return err
	}
	l.channels = append(l.channels, made.ID)
	ids, err := h.NewConversations(ctx, t, made.ID, n)
	for _, id := range ids {
		l.conversations = append(l.conversations, &conversation{id: id, tenant: t})
	}
	return err
}
