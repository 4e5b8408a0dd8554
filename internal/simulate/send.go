package simulate

import (
	"bytes"
	"cmp"
	"context"
	cryptorand "crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode"
)

const (
	maxMessages    = 100_000 // they are all built before the first post
	maxAnswer      = 64 << 10
	defaultTimeout = 10 * time.Second
)

// seededTime stands in for the clock in what a seeded run sends, so that the
// same seed makes the same bytes: 2026-01-01T00:00:00Z. Signatures carry the
// real time, or they would be stale.
var seededTime = time.Unix(1767225600, 0)

// SendOptions is what WhatsApp and Webhook have in common.
type SendOptions struct {
	// BaseURL is where the hub listens, such as http://127.0.0.1:4000. Posts go
	// to BaseURL/api/v1/channels/{ChannelID}/inbound. Required.
	BaseURL string
	// ChannelID is the channel that receives. Required.
	ChannelID string
	// Messages is how many messages to send, at most 100,000. Zero means the
	// default of the function.
	Messages int
	// Repeat is how often to post each body, byte for byte, as a provider does
	// that missed the answer. Zero and one mean once.
	Repeat int
	// Shuffle sends in random order: messages within and across bodies, and the
	// posts with their repeats.
	Shuffle bool
	// BadSignature signs with a wrong key. Then 401 is the expected answer and
	// anything else an error.
	BadSignature bool
	// Seed makes runs alike: the same options and seed make the same bodies, ids
	// and message times included, in the same order. Zero picks a seed, so that
	// every run has new ids; the output names it.
	Seed uint64
	// Timeout is how long to wait for one answer. Zero means 10 s.
	Timeout time.Duration
	// Yes permits a BaseURL outside this machine.
	Yes bool
	// Out receives a line for each post and a summary. Required.
	Out io.Writer
}

// sender is a checked SendOptions with its defaults filled in.
type sender struct {
	SendOptions
	target string
	client *http.Client
	rand   *rand.Rand
	now    time.Time // for what is sent
}

// post is one body to send, as often as it is repeated.
type post struct {
	body  []byte
	holds []string // what is in it, for people
	sent  bool
	// sign sets the headers of the signature for one try.
	sign func(header http.Header, now time.Time) error
}

// newSender checks the options and resolves the target.
func newSender(ctx context.Context, o SendOptions, defaultMessages int) (*sender, error) {
	o.Messages = cmp.Or(o.Messages, defaultMessages)
	o.Repeat = cmp.Or(o.Repeat, 1)
	o.Timeout = cmp.Or(o.Timeout, defaultTimeout)
	switch {
	case o.Out == nil:
		return nil, errors.New("no writer for the output")
	case o.ChannelID == "":
		return nil, errors.New("no channel id")
	case o.Messages < 0 || o.Messages > maxMessages:
		return nil, fmt.Errorf("%d messages: want 1 to %d", o.Messages, maxMessages)
	case o.Repeat < 0:
		return nil, fmt.Errorf("repeat %d: want 1 or more", o.Repeat)
	case o.Timeout < 0:
		return nil, fmt.Errorf("timeout %s: want more than 0", o.Timeout)
	}
	base, err := url.Parse(o.BaseURL)
	if err != nil || (base.Scheme != "http" && base.Scheme != "https") || base.Hostname() == "" {
		// Not quoted: an address may hold a password.
		return nil, errors.New("the base URL is not of the form http://host:port")
	}
	if base.User != nil || base.RawQuery != "" || base.Fragment != "" {
		return nil, errors.New("the base URL has a user, a query or a fragment")
	}
	dialer := &net.Dialer{}
	if !o.Yes {
		if err := RequireLoopback(ctx, net.DefaultResolver.LookupNetIP, base.Hostname()); err != nil {
			return nil, fmt.Errorf("base URL: %w", err)
		}
		dialer.Control = LoopbackOnly
	}

	s := &sender{SendOptions: o, now: seededTime}
	s.target = base.JoinPath("api", "v1", "channels", url.PathEscape(o.ChannelID), "inbound").String()
	s.client = &http.Client{
		// Proxy stays nil: a proxy of the environment is another machine.
		Transport: &http.Transport{DialContext: dialer.DialContext},
		Timeout:   o.Timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse // providers do not follow either
		},
	}
	if s.Seed == 0 {
		var b [8]byte
		_, _ = cryptorand.Read(b[:]) // never fails
		s.Seed = max(binary.LittleEndian.Uint64(b[:]), 1)
		s.now = time.Now()
	}
	s.rand = rand.New(rand.NewPCG(s.Seed, 0))
	return s, nil
}

// key returns the key to sign with.
func (s *sender) key(right []byte) []byte {
	if s.BadSignature {
		return append([]byte("not "), right...)
	}
	return right
}

// run sends the posts and prints how it went. hints says what to do about an
// unexpected status. It returns an error if a post was not answered as
// expected, and the context's if that ended it.
func (s *sender) run(ctx context.Context, posts []*post, hints map[int]string) error {
	defer s.client.CloseIdleConnections()
	var queue []*post
	for _, p := range posts {
		for range s.Repeat {
			queue = append(queue, p)
		}
	}
	if s.Shuffle {
		s.rand.Shuffle(len(queue), func(i, j int) { queue[i], queue[j] = queue[j], queue[i] })
	}

	var (
		answers = map[string]int{}
		hinted  = map[int]bool{}
		sent    int
		failed  int
		slowest time.Duration
	)
	for _, p := range queue {
		begin := time.Now()
		status, answer, err := s.try(ctx, p)
		took := time.Since(begin)
		if ctx.Err() != nil {
			break
		}
		sent++
		slowest = max(slowest, took)
		label := "no answer"
		if err == nil {
			label = fmt.Sprint(status)
		}
		answers[label]++
		holds := strings.Join(p.holds, ", ")
		if p.sent {
			holds = "again: " + holds
		}
		p.sent = true
		fmt.Fprintf(s.Out, "#%-4d %-9s %8.1f ms  %s (%d B)\n", sent, label, ms(took), holds, len(p.body))

		if err == nil && s.expected(status) {
			continue
		}
		failed++
		if err != nil {
			fmt.Fprintf(s.Out, "      %s\n", clean(err.Error(), 300))
		} else {
			fmt.Fprintf(s.Out, "      %s\n", explain(answer, s.BadSignature && success(status)))
		}
		if !hinted[status] {
			hinted[status] = true
			fmt.Fprintf(s.Out, "      What to do: %s\n", hint(status, hints))
		}
	}

	fmt.Fprintf(s.Out, "%d of %d posts sent, %d as expected; answers: %s; slowest %.1f ms; seed %d\n",
		sent, len(queue), sent-failed, counts(answers), ms(slowest), s.Seed)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case failed > 0:
		return fmt.Errorf("%d of %d posts were not answered as expected", failed, sent)
	}
	return nil
}

// try posts once. status is 0 if there was no answer.
func (s *sender) try(ctx context.Context, p *post) (status int, answer []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.target, bytes.NewReader(p.body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "converger-simulate")
	if err := p.sign(req.Header, time.Now()); err != nil {
		return 0, nil, err
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return 0, nil, fmt.Errorf("read the answer: %w", err)
	}
	if location := resp.Header.Get("Location"); location != "" && resp.StatusCode/100 == 3 {
		answer = []byte("It redirects to " + location)
	}
	return resp.StatusCode, answer, nil
}

func success(status int) bool { return status >= 200 && status < 300 }

func (s *sender) expected(status int) bool {
	if s.BadSignature {
		return status == http.StatusUnauthorized
	}
	return success(status)
}

// explain makes one line of a refusal: a problem's detail and fields (RFC
// 9457), or the beginning of whatever else came.
func explain(answer []byte, forged bool) string {
	if forged {
		return "The hub accepted a wrong signature."
	}
	var problem struct {
		Title  string `json:"title"`
		Detail string `json:"detail"`
		Errors []struct {
			Pointer string `json:"pointer"`
			Detail  string `json:"detail"`
		} `json:"errors"`
	}
	// A body of another form leaves the members empty.
	_ = json.Unmarshal(answer, &problem)
	line := cmp.Or(problem.Detail, problem.Title)
	if line == "" {
		return cmp.Or(clean(string(answer), 300), "The answer has no body.")
	}
	for i, e := range problem.Errors {
		if i == 5 {
			line += "; …"
			break
		}
		line += fmt.Sprintf("; %s %s", e.Pointer, e.Detail)
	}
	return clean(line, 600)
}

func hint(status int, hints map[int]string) string {
	if text, ok := hints[status]; ok {
		return text
	}
	switch {
	case status == 0:
		return "start the hub, or correct the base URL."
	case success(status):
		return "the channel does not require signatures, or the check is broken."
	case status < 400:
		return "redirects are not followed; use the address that it names as base URL."
	case status == http.StatusTooManyRequests:
		return "wait as long as the answer says, or raise the channel's inbound limit."
	case status == http.StatusNotFound:
		return "correct the channel id; server dev writes the ids of the demo channels to demo.json."
	case status >= 500:
		return "look at the hub's log; a provider would send this again later."
	default:
		return "read the answer above; the hub refuses this request every time."
	}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// clean makes foreign text fit for one line of a terminal: without control
// characters, which could move the cursor or hide text, and at most limit runes.
func clean(text string, limit int) string {
	var b strings.Builder
	n := 0
	for _, r := range strings.TrimSpace(text) {
		if n == limit {
			b.WriteRune('…')
			break
		}
		if !unicode.IsPrint(r) {
			r = ' '
		}
		b.WriteRune(r)
		n++
	}
	return b.String()
}

// counts lists how often each name occurred, in order of the names.
func counts(m map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, fmt.Sprintf("%s × %d", name, m[name]))
	}
	return cmp.Or(strings.Join(parts, ", "), "none")
}
