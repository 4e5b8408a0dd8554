package hub

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// retries is how often a request is repeated that was told to come back later: setting up may meet a hub's limits.
const retries = 30

// Client calls a hub's API for setting up and checking, not for load. It is safe for concurrent use.
type Client struct {
	Base  string // such as http://127.0.0.1:4000
	Token string // of an operator
	HTTP  *http.Client
}

// StatusError is a refusal.
type StatusError struct {
	Method, Path string
	Status       int
	Body         string // the beginning
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("%s %s: HTTP %d\n%s", e.Method, e.Path, e.Status, e.Body)
}

// Call sends a JSON request and reads the answer into out, if out is not nil. credential is a header and its value. What
// is refused with 429 or 503 and a Retry-After is repeated. Errors: *StatusError, or the connection's.
func (c *Client) Call(ctx context.Context, method, path string, credential [2]string, in, out any) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return err
		}
	}
	for try := 1; ; try++ {
		status, header, answer, err := c.exchange(ctx, method, path, credential, body)
		if err != nil {
			return err
		}
		switch {
		case status < 300 && out == nil:
			return nil
		case status < 300:
			return json.Unmarshal(answer, out)
		}
		wait, err := strconv.Atoi(header.Get("Retry-After"))
		if err != nil || try > retries || status != http.StatusTooManyRequests && status != http.StatusServiceUnavailable {
			return &StatusError{Method: method, Path: path, Status: status, Body: string(answer[:min(len(answer), 500)])}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Duration(min(wait, 60)) * time.Second):
		}
	}
}

func (c *Client) exchange(ctx context.Context, method, path string, credential [2]string, body []byte) (int, http.Header, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.Base+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set(credential[0], credential[1])
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return 0, nil, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, answer, err
}

// Operate is Call of the management API, by the operator's token.
func (c *Client) Operate(ctx context.Context, method, path string, in, out any) error {
	return c.Call(ctx, method, "/api/v1/management"+path, [2]string{"Authorization", "Bearer " + c.Token}, in, out)
}

// Tenant is one that NewTenant made.
type Tenant struct{ ID, APIKey, KeyID string }

// As is the tenant's credential for Call.
func (t *Tenant) As() [2]string { return [2]string{"X-Api-Key", t.APIKey} }

// NewTenant makes a tenant with an API key. With an error of the key the tenant is returned all the same.
func (c *Client) NewTenant(ctx context.Context, name string) (*Tenant, error) {
	var made struct{ Data struct{ ID string } }
	if err := c.Operate(ctx, http.MethodPost, "/tenants", map[string]any{"name": name}, &made); err != nil {
		return nil, err
	}
	var key struct {
		Data struct {
			ID     string
			APIKey string `json:"api_key"`
		}
	}
	err := c.Operate(ctx, http.MethodPost, "/tenants/"+made.Data.ID+"/keys", map[string]any{"name": "load"}, &key)
	return &Tenant{ID: made.Data.ID, APIKey: key.Data.APIKey, KeyID: key.Data.ID}, err
}

// Channel is one that NewChannel made.
type Channel struct{ ID, Secret string }

// NewChannel makes a webhook channel that delivers to url; "" is nowhere.
func (c *Client) NewChannel(ctx context.Context, t *Tenant, name, mode, url string) (*Channel, error) {
	in := map[string]any{"name": name, "type": "webhook", "mode": mode, "config": map[string]any{}}
	if url != "" {
		in["config"] = map[string]any{"url": url}
	}
	var made struct{ Data Channel }
	if err := c.Operate(ctx, http.MethodPost, "/tenants/"+t.ID+"/channels", in, &made); err != nil {
		return nil, err
	}
	return &made.Data, nil
}

// NewConversations opens n conversations of a channel, ten at a time, and returns their ids.
func (c *Client) NewConversations(ctx context.Context, t *Tenant, channel string, n int) ([]string, error) {
	const at = 10
	ids := make([]string, n)
	errs := make([]error, at)
	var wg sync.WaitGroup
	for g := range at {
		wg.Go(func() {
			for i := g; i < n; i += at {
				var made struct{ Data struct{ ID string } }
				errs[g] = c.Call(ctx, http.MethodPost, "/api/v1/conversations", t.As(), map[string]any{"channel_id": channel}, &made)
				if errs[g] != nil {
					return
				}
				ids[i] = made.Data.ID
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// Deal reorders items in place, of which each tenant has n in a row, so that neighbours belong to different tenants.
func Deal[T any](items []T, n int) {
	dealt := make([]T, 0, len(items))
	for i := range n {
		for t := range len(items) / n {
			dealt = append(dealt, items[t*n+i])
		}
	}
	copy(items, dealt)
}
