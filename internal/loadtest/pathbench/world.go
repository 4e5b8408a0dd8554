package main

import (
	"context"
	"fmt"
	"net/http"
	"sync"
)

const (
	worldTenants          = 20
	conversationsOfTenant = 50 // on each of its channels
)

type tenant struct {
	id     string
	apiKey string
}

type conversation struct {
	id     string
	tenant *tenant
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
func newWorld(ctx context.Context, h *hub, fast, slow string) (*world, error) {
	w := &world{}
	for i := range worldTenants {
		t, err := newTenant(ctx, h, fmt.Sprintf("bench %02d", i+1))
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
	w.out.shuffle()
	w.in.shuffle()
	t, err := newTenant(ctx, h, "noisy neighbour")
	if err != nil {
		return nil, err
	}
	return w, w.noisy.add(ctx, h, t, "duplex", slow, noisyLanes)
}

func newTenant(ctx context.Context, h *hub, name string) (*tenant, error) {
	var made struct{ Data struct{ ID string } }
	if err := h.operate(ctx, http.MethodPost, "/api/v1/management/tenants", map[string]any{"name": name}, &made); err != nil {
		return nil, err
	}
	var key struct {
		Data struct {
			APIKey string `json:"api_key"`
		}
	}
	path := "/api/v1/management/tenants/" + made.Data.ID + "/keys"
	if err := h.operate(ctx, http.MethodPost, path, map[string]any{"name": "bench"}, &key); err != nil {
		return nil, err
	}
	return &tenant{id: made.Data.ID, apiKey: key.Data.APIKey}, nil
}

// add makes a channel of t with n conversations.
func (l *lanes) add(ctx context.Context, h *hub, t *tenant, mode, url string, n int) error {
	in := map[string]any{"name": mode, "type": "webhook", "mode": mode, "config": map[string]any{}}
	if url != "" {
		in["config"] = map[string]any{"url": url}
	}
	var made struct{ Data struct{ ID string } }
	if err := h.operate(ctx, http.MethodPost, "/api/v1/management/tenants/"+t.id+"/channels", in, &made); err != nil {
		return err
	}
	l.channels = append(l.channels, made.Data.ID)

	const at = 10 // requests at once
	conversations := make([]*conversation, n)
	errs := make([]error, at)
	var wg sync.WaitGroup
	for g := range at {
		wg.Go(func() {
			for i := g; i < len(conversations); i += at {
				var conv struct{ Data struct{ ID string } }
				errs[g] = h.call(ctx, http.MethodPost, "/api/v1/conversations", [2]string{"X-Api-Key", t.apiKey},
					map[string]any{"channel_id": made.Data.ID}, &conv)
				if errs[g] != nil {
					return
				}
				conversations[i] = &conversation{id: conv.Data.ID, tenant: t}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	l.conversations = append(l.conversations, conversations...)
	return nil
}

// shuffle deals the conversations out so that each follows one of another tenant.
func (l *lanes) shuffle() {
	dealt := make([]*conversation, 0, len(l.conversations))
	for i := range conversationsOfTenant {
		for t := range len(l.conversations) / conversationsOfTenant {
			dealt = append(dealt, l.conversations[t*conversationsOfTenant+i])
		}
	}
	l.conversations = dealt
}
