package messages

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"converger/internal/loadtest/hub"
	"converger/internal/signature"
)

// namePrefix begins the names of all tenants of load tests, so that operators know them.
const namePrefix = "loadtest "

// place is where a message goes: a conversation of a tenant, or a person who writes to a channel.
type place struct {
	path   string
	head   string // header lines
	person string // of an inbound message
	secret string // that signs it
}

// world is what was made for a run.
type world struct {
	tenants  []*hub.Tenant
	channels []string // of all tenants
	posts    []place
	webhooks []place
}

// build makes tenants, channels and conversations. With an error the world holds what was made until then.
func (o Options) build(ctx context.Context, run, receiver string) (*world, error) {
	w := &world{}
	for i := range o.Tenants {
		t, err := o.Hub.NewTenant(ctx, fmt.Sprintf("%s%s %04d", namePrefix, run, i+1))
		if t != nil {
			w.tenants = append(w.tenants, t)
		}
		if err == nil {
			err = o.furnish(ctx, w, t, receiver)
		}
		if err != nil {
			return w, fmt.Errorf("set up: %w", err)
		}
	}
	hub.Deal(w.posts, o.Channels*o.Conversations)
	hub.Deal(w.webhooks, o.Conversations)
	return w, nil
}

// furnish makes a tenant's channels and conversations, and moves its limits out of the way.
func (o Options) furnish(ctx context.Context, w *world, t *hub.Tenant, receiver string) error {
	for _, bucket := range []string{"activity_create", "inbound", "api_read"} {
		if err := o.Hub.Operate(ctx, http.MethodPut, "/tenants/"+t.ID+"/limits/"+bucket, map[string]any{"limit": 1_000_000_000, "scale_ms": 1000}, nil); err != nil {
			return err
		}
	}
	mode := "duplex"
	if receiver == "" {
		mode = "inbound" // takes posts, and sends nothing
	}
	var first string
	for i := range o.Channels {
		ch, err := o.Hub.NewChannel(ctx, t, fmt.Sprintf("out %d", i+1), mode, receiver)
		if refused, ok := errors.AsType[*hub.StatusError](err); ok && refused.Status == http.StatusUnprocessableEntity && receiver != "" {
			return fmt.Errorf("%w\nMay the hub deliver to %s? It needs WEBHOOK_ALLOWED_TARGETS for addresses that are not public; or deliver nothing", err, receiver)
		}
		if err != nil {
			return err
		}
		w.channels = append(w.channels, ch.ID)
		if i == 0 {
			first = ch.ID
		}
		ids, err := o.Hub.NewConversations(ctx, t, ch.ID, o.Conversations)
		if err != nil {
			return err
		}
		for _, id := range ids {
			w.posts = append(w.posts, place{path: "/api/v1/conversations/" + id + "/activities",
				head: "X-Api-Key: " + t.APIKey + "\r\nContent-Type: application/json\r\n"})
		}
	}
	if o.Inbound == 0 {
		return nil
	}
	ch, err := o.Hub.NewChannel(ctx, t, "in", "inbound", "")
	if err != nil {
		return err
	}
	w.channels = append(w.channels, ch.ID)
	for i := range o.Conversations {
		w.webhooks = append(w.webhooks, place{path: "/api/v1/channels/" + ch.ID + "/inbound", head: "Content-Type: application/json\r\n",
			person: fmt.Sprintf("person-%d", i+1), secret: ch.Secret})
	}
	if receiver == "" {
		return nil
	}
	// What comes in goes out to the first channel, in lanes of its own.
	return o.Hub.Call(ctx, http.MethodPost, "/api/v1/routing_rules", t.As(), map[string]any{"routing_rule": map[string]any{
		"name": "in to out", "source_channel_id": ch.ID, "target_channel_ids": []string{first}}}, nil)
}

// rest deletes the channels, which destroys their secrets, revokes the keys and suspends the tenants: there is no way to
// delete a tenant, and its messages go with their month's partition.
func (w *world) rest(ctx context.Context, c *hub.Client) error {
	var all []error
	try := func(method, path string) {
		err := c.Operate(ctx, method, path, nil, nil)
		if refused, ok := errors.AsType[*hub.StatusError](err); ok && refused.Status == http.StatusNotFound {
			return
		}
		all = append(all, err)
	}
	for _, id := range w.channels {
		try(http.MethodDelete, "/channels/"+id)
	}
	for _, t := range w.tenants {
		if t.KeyID != "" {
			try(http.MethodPost, "/tenants/"+t.ID+"/keys/"+t.KeyID+"/revoke")
		}
		try(http.MethodPost, "/tenants/"+t.ID+"/suspend")
	}
	return errors.Join(all...)
}

// request makes the head and body of a message.
func (p place) request(key, text string, now time.Time) (head string, body []byte, err error) {
	if p.secret == "" {
		// Key and text have nothing to escape.
		return p.head + "Idempotency-Key: \"" + key + "\"\r\n", []byte(`{"text":"` + text + `"}`), nil
	}
	body, err = json.Marshal(map[string]string{"text": text, "external_id": p.person, "idempotency_key": key})
	if err != nil {
		return "", nil, err
	}
	header := http.Header{}
	if err := signature.SignTimestamped(header, body, [][]byte{[]byte(p.secret)}, now); err != nil {
		return "", nil, err
	}
	var b strings.Builder
	b.WriteString(p.head)
	if err := header.Write(&b); err != nil {
		return "", nil, err
	}
	return b.String(), body, nil
}
