package main

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/google/uuid"
)

type inboundCmd struct {
	List   inboundListCmd   `cmd:"" help:"List received webhooks, newest first."`
	Show   inboundShowCmd   `cmd:"" help:"Show one with its body."`
	Replay inboundReplayCmd `cmd:"" help:"Process a rejected or failed one again."`
}

// managementFlags say which hub to ask, and by whose token.
type managementFlags struct {
	demoFlags
	BaseURL string `help:"The hub; default is the demo's." placeholder:"https://hub.example.com"`
	Token   string `help:"Operator token; default is the environment's MANAGEMENT_TOKEN, then the demo's."`
}

// problem is what the hub answers when it refuses.
type problem struct {
	Title     string `json:"title"`
	Detail    string `json:"detail"`
	RequestID string `json:"request_id"`
}

// call asks the management API and decodes its answer into out.
func (f managementFlags) call(e *env, method, path string, query url.Values, in, out any) error {
	d, err := f.read()
	if err != nil {
		return err
	}
	base, token := f.BaseURL, cmp.Or(f.Token, e.getenv("MANAGEMENT_TOKEN"))
	if base == "" {
		base = d.BaseURL
	}
	if token == "" && base == d.BaseURL {
		token = d.ManagementToken
	}
	if base == "" || token == "" {
		return errors.New("which hub, and by whose token? Pass --base-url and --token (server operator create makes one), or start `server dev`")
	}
	if !strings.HasPrefix(base, "http://") && !strings.HasPrefix(base, "https://") {
		return fmt.Errorf("--base-url must begin with http:// or https://, not %q", base)
	}
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	target := strings.TrimRight(base, "/") + "/api/v1/management" + path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(e.ctx, method, target, body)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	client := &http.Client{Timeout: 30 * time.Second}
	res, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("%w\nIs the hub running at %s?", err, base)
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(res.Body, 64<<20))
	if err != nil {
		return err
	}
	if res.StatusCode >= 300 {
		var p problem
		if json.Unmarshal(answer, &p) != nil || p.Title == "" {
			return fmt.Errorf("the hub answered %s", res.Status)
		}
		return fmt.Errorf("%s: %s (request %s)", p.Title, p.Detail, p.RequestID)
	}
	return json.Unmarshal(answer, out)
}

type inboundEvent struct {
	ID         uuid.UUID       `json:"id"`
	TenantID   uuid.UUID       `json:"tenant_id"`
	ChannelID  uuid.UUID       `json:"channel_id"`
	Endpoint   string          `json:"endpoint"`
	State      string          `json:"state"`
	Error      *string         `json:"error"`
	Result     json.RawMessage `json:"result"`
	InsertedAt time.Time       `json:"inserted_at"`
}

type inboundListCmd struct {
	managementFlags
	State   string `help:"Only those that are received, processed, rejected or failed." enum:"received,processed,rejected,failed," default:"" placeholder:"STATE"`
	Tenant  string `help:"Only this tenant's." placeholder:"ID"`
	Channel string `help:"Only this channel's." placeholder:"ID"`
	Limit   int    `help:"Most to show." default:"50"`
}

func (c inboundListCmd) Run(e *env) error {
	q := url.Values{}
	for name, v := range map[string]string{"state": c.State, "tenant_id": c.Tenant, "channel_id": c.Channel, "limit": fmt.Sprint(c.Limit)} {
		if v != "" {
			q.Set(name, v)
		}
	}
	var page struct {
		Data []inboundEvent `json:"data"`
		Meta struct {
			HasMore bool `json:"has_more"`
		} `json:"meta"`
	}
	if err := c.call(e, http.MethodGet, "/inbound_events", q, nil, &page); err != nil {
		return err
	}
	if len(page.Data) == 0 {
		fmt.Fprintln(e.stdout, "No events match.")
		return nil
	}
	w := tabwriter.NewWriter(e.stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintln(w, "RECEIVED\tSTATE\tID\tTENANT\tCHANNEL\tENDPOINT\tERROR")
	for _, x := range page.Data {
		reason := ""
		if x.Error != nil {
			reason = *x.Error
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", x.InsertedAt.UTC().Format(time.RFC3339), x.State, x.ID, x.TenantID, x.ChannelID, x.Endpoint, reason)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if page.Meta.HasMore {
		fmt.Fprintln(e.stderr, "There are more; narrow the list or raise --limit.")
	}
	return nil
}

// tenantFlag names whose events they are; inbound list shows it.
type tenantFlag struct {
	Tenant string `help:"The event's tenant; default is the demo's." placeholder:"ID"`
}

// path is where the management API keeps an event.
func (t tenantFlag) path(f managementFlags, event uuid.UUID) (string, error) {
	tenant := t.Tenant
	if tenant == "" {
		d, err := f.read()
		if err != nil {
			return "", err
		}
		if tenant = d.Tenant.ID; tenant == "" {
			return "", errors.New("whose event? Pass --tenant ID (inbound list shows it)")
		}
	}
	return "/tenants/" + url.PathEscape(tenant) + "/inbound_events/" + event.String(), nil
}

type inboundShowCmd struct {
	managementFlags
	tenantFlag
	ID uuid.UUID `arg:"" help:"Id of the event."`
}

func (c inboundShowCmd) Run(e *env) error {
	path, err := c.path(c.managementFlags, c.ID)
	if err != nil {
		return err
	}
	var answer struct {
		Data map[string]any `json:"data"`
	}
	if err := c.call(e, http.MethodGet, path, nil, nil, &answer); err != nil {
		return err
	}
	encoded, _ := answer.Data["body"].(string)
	body, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return fmt.Errorf("the hub's answer holds no readable body: %w", err)
	}
	delete(answer.Data, "body")
	pretty, err := json.MarshalIndent(answer.Data, "", "  ")
	if err != nil {
		return err
	}
	fmt.Fprintf(e.stdout, "%s\n\n%s\n", pretty, printable(body))
	return nil
}

// printable shows bytes from outside on a terminal: what could steer it is escaped.
func printable(b []byte) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, string(b))
}

type inboundReplayCmd struct {
	managementFlags
	tenantFlag
	IDs []uuid.UUID `arg:"" name:"id" help:"Ids of the events."`
}

func (c inboundReplayCmd) Run(e *env) error {
	var all error
	for _, id := range c.IDs {
		path, err := c.path(c.managementFlags, id)
		if err != nil {
			return err
		}
		var answer json.RawMessage
		if err := c.call(e, http.MethodPost, path+"/replay", nil, nil, &answer); err != nil {
			all = errors.Join(all, fmt.Errorf("%s: %w", id, err))
			continue
		}
		fmt.Fprintf(e.stdout, "%s is queued again.\n", id)
	}
	return all
}
