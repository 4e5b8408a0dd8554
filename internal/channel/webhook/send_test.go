package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"converger/internal/channel"
	"converger/internal/channel/channeltest"
	"converger/internal/signature"
)

func outboundChannel(t testing.TB, config map[string]any) *channel.Channel {
	t.Helper()
	raw, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	return &channel.Channel{Type: channel.TypeWebhook, Mode: channel.ModeOutbound, Config: raw, Secret: channeltest.Secret, RequireSignature: true}
}

func outbound() channel.Outbound {
	return channel.Outbound{
		DeliveryID: uuid.MustParse("01930000-0000-7000-8000-00000000000d"),
		Attempt:    1, Body: []byte(`{"text":"hi"}`), Now: time.Now(),
	}
}

func send(t testing.TB, config map[string]any) channel.Outcome {
	t.Helper()
	return newAdapter(t, channel.GuardOptions{AllowPrivate: true}).Send(t.Context(), outboundChannel(t, config), outbound())
}

func receiver(t testing.TB, handler http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewServer(handler)
	t.Cleanup(s.Close)
	return s.URL
}

func TestSendRequest(t *testing.T) {
	t.Parallel()
	const previous = "whsec_cHJldmlvdXMgc2VjcmV0IG9mIGEgY2hhbm5lbCE="
	var got *http.Request
	var body []byte
	url := receiver(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		body, _ = io.ReadAll(r.Body)
		w.WriteHeader(http.StatusAccepted)
		fmt.Fprint(w, "thanks, Bearer abcdefgh")
	})
	ch := outboundChannel(t, map[string]any{"url": url + "/in?key=1", "method": "PATCH", "headers": map[string]string{"authorization": "Bearer abcdefgh"}})
	out := outbound()
	ch.PreviousSecret, ch.PreviousUntil = previous, out.Now.Add(time.Hour)
	outcome := newAdapter(t, channel.GuardOptions{AllowPrivate: true}).Send(t.Context(), ch, out)
	if diff := cmp.Diff(channel.Outcome{Kind: channel.Sent, StatusCode: 202, Response: "thanks, [redacted]"}, outcome); diff != "" {
		t.Fatal(diff)
	}

	if got.Method != http.MethodPatch || got.URL.RequestURI() != "/in?key=1" || !bytes.Equal(body, out.Body) {
		t.Errorf("request %s %s %s", got.Method, got.URL, body)
	}
	for name, want := range map[string]string{
		"Content-Type":            "application/json",
		"Authorization":           "Bearer abcdefgh",
		"X-Converger-Event":       "activity.created",
		"X-Converger-Delivery-Id": out.DeliveryID.String(),
		"Webhook-Id":              out.DeliveryID.String(),
		"Webhook-Timestamp":       fmt.Sprint(out.Now.Unix()),
		"Accept-Encoding":         "",
		"Idempotency-Key":         "",
	} {
		if v := got.Header.Get(name); v != want {
			t.Errorf("%s is %q, want %q", name, v, want)
		}
	}
	// Receivers of either secret accept both schemes, one of them by a library that is not ours.
	for _, secret := range []string{channeltest.Secret, previous} {
		if err := signature.VerifyTimestamped(got.Header, body, [][]byte{[]byte(secret)}, out.Now); err != nil {
			t.Errorf("timestamped with %s: %v", secret, err)
		}
		library, err := standardwebhooks.NewWebhook(secret)
		if err != nil {
			t.Fatal(err)
		}
		if err := library.Verify(body, got.Header); err != nil {
			t.Errorf("standard with %s: %v", secret, err)
		}
	}
}

// An answer that repeats the request does not show the channel's header values, in whatever form it repeats them.
func TestAnswerWithoutSecrets(t *testing.T) {
	t.Parallel()
	c := config{Headers: map[string]string{"Authorization": "Bearer s3cret-credential", "X-Own": `quoted "value" <1>`, "X-Short": "short", "X-Longer": "s3cret-credential-and-more"}}
	for name, test := range map[string]struct{ answer, want string }{
		"as sent":                    {"Authorization: Bearer s3cret-credential!", "Authorization: [redacted]!"},
		"without the scheme":         {"bad token s3cret-credential", "bad token [redacted]"},
		"a value within another":     {"s3cret-credential-and-more", "[redacted]"},
		"in JSON":                    {`{"x-own":"quoted \"value\" \u003c1\u003e"}`, `{"x-own":"[redacted]"}`},
		"cut off at the end":         {"you sent Bearer s3cret-cre", "you sent Bearer [redacted]"},
		"cut off after few letters":  {"you sent s3cret-", "you sent s3cret-"},
		"a short one riddles nobody": {"in short: no", "in short: no"},
		"twice":                      {"s3cret-credential s3cret-credential", "[redacted] [redacted]"},
		"cut off and long":           {strings.Repeat("x", maxExcerpt-9) + "s3cret-cr", strings.Repeat("x", maxExcerpt-len(channel.Redacted)) + channel.Redacted},
	} {
		if got := withoutSecrets(test.answer, c); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

func TestSendSignsEachAttemptAfresh(t *testing.T) {
	t.Parallel()
	var headers []http.Header
	url := receiver(t, func(_ http.ResponseWriter, r *http.Request) { headers = append(headers, r.Header) })
	a, ch, out := newAdapter(t, channel.GuardOptions{AllowPrivate: true}), outboundChannel(t, map[string]any{"url": url}), outbound()
	for range 2 {
		a.Send(t.Context(), ch, out)
		out.Attempt, out.Now = 2, out.Now.Add(20*time.Minute)
	}
	if headers[0].Get("Webhook-Id") != headers[1].Get("Webhook-Id") {
		t.Error("the id changed")
	}
	for _, name := range []string{"Webhook-Timestamp", "Webhook-Signature", "X-Converger-Signature"} {
		if headers[0].Get(name) == headers[1].Get(name) {
			t.Errorf("%s is that of the first attempt", name)
		}
	}
}

func TestSendByStatus(t *testing.T) {
	t.Parallel()
	now := outbound().Now
	for name, tt := range map[string]struct {
		status int
		header map[string]string
		want   channel.Outcome
		words  string
	}{
		"200":                       {status: 200, want: channel.Outcome{Kind: channel.Sent}},
		"204":                       {status: 204, want: channel.Outcome{Kind: channel.Sent}},
		"301":                       {301, map[string]string{"Location": "http://127.0.0.1:5432/?token=s3cret"}, channel.Outcome{Kind: channel.Failed, Reason: "redirect"}, `host "127.0.0.1"`},
		"302 to a file":             {302, map[string]string{"Location": "file:///etc/passwd"}, channel.Outcome{Kind: channel.Failed, Reason: "redirect"}, "final address"},
		"304":                       {304, nil, channel.Outcome{Kind: channel.Failed, Reason: "redirect"}, "HTTP 304"},
		"307 without a Location":    {307, nil, channel.Outcome{Kind: channel.Failed, Reason: "redirect"}, "final address"},
		"400":                       {400, nil, channel.Outcome{Kind: channel.Failed, Reason: "rejected"}, "HTTP 400 Bad Request"},
		"400 with a Retry-After":    {400, map[string]string{"Retry-After": "9"}, channel.Outcome{Kind: channel.Failed, Reason: "rejected"}, ""},
		"404":                       {404, nil, channel.Outcome{Kind: channel.Failed, Reason: "rejected"}, ""},
		"408":                       {408, nil, channel.Outcome{Kind: channel.Retry, Reason: "rejected"}, ""},
		"410":                       {410, nil, channel.Outcome{Kind: channel.Failed, Reason: "gone", Disable: true}, "no more"},
		"425":                       {425, nil, channel.Outcome{Kind: channel.Retry, Reason: "rejected"}, ""},
		"429":                       {429, map[string]string{"Retry-After": "120"}, channel.Outcome{Kind: channel.Retry, Reason: "rate_limited", RetryAfter: 2 * time.Minute}, ""},
		"429 until a date":          {429, map[string]string{"Retry-After": now.Add(90 * time.Second).UTC().Format(http.TimeFormat)}, channel.Outcome{Kind: channel.Retry, Reason: "rate_limited", RetryAfter: 90 * time.Second}, ""},
		"429 until a date gone by":  {429, map[string]string{"Retry-After": now.Add(-time.Hour).UTC().Format(http.TimeFormat)}, channel.Outcome{Kind: channel.Retry, Reason: "rate_limited"}, ""},
		"429 for an age":            {429, map[string]string{"Retry-After": "999999999"}, channel.Outcome{Kind: channel.Retry, Reason: "rate_limited", RetryAfter: time.Hour}, ""},
		"429 for more than a word":  {429, map[string]string{"Retry-After": "99999999999999999999999"}, channel.Outcome{Kind: channel.Retry, Reason: "rate_limited", RetryAfter: time.Hour}, ""},
		"429 for less than nothing": {429, map[string]string{"Retry-After": "-5"}, channel.Outcome{Kind: channel.Retry, Reason: "rate_limited"}, ""},
		"429 for nothing":           {429, map[string]string{"Retry-After": "0"}, channel.Outcome{Kind: channel.Retry, Reason: "rate_limited"}, ""},
		"429 for garbage":           {429, map[string]string{"Retry-After": "soon"}, channel.Outcome{Kind: channel.Retry, Reason: "rate_limited"}, ""},
		"500":                       {500, nil, channel.Outcome{Kind: channel.Retry, Reason: "server_error"}, "HTTP 500"},
		"503":                       {503, map[string]string{"Retry-After": "30"}, channel.Outcome{Kind: channel.Retry, Reason: "server_error", RetryAfter: 30 * time.Second}, ""},
		"599":                       {599, nil, channel.Outcome{Kind: channel.Retry, Reason: "server_error"}, "HTTP 599"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := receiver(t, func(w http.ResponseWriter, _ *http.Request) {
				for k, v := range tt.header {
					w.Header().Set(k, v)
				}
				w.WriteHeader(tt.status)
			})
			out := outbound()
			out.Now = now
			got := newAdapter(t, channel.GuardOptions{AllowPrivate: true}).Send(t.Context(), outboundChannel(t, map[string]any{"url": url}), out)
			if !strings.Contains(got.Error, tt.words) || (got.Error == "") != (got.Kind == channel.Sent) || strings.Contains(got.Error, "s3cret") {
				t.Errorf("error %q, want one with %q", got.Error, tt.words)
			}
			got.Error = ""
			tt.want.StatusCode = tt.status
			// A date has whole seconds.
			if d := tt.want.RetryAfter - got.RetryAfter; d > 0 && d <= time.Second && strings.Contains(name, "date") {
				got.RetryAfter = tt.want.RetryAfter
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// raw listens and treats each connection as handle says.
func raw(t *testing.T, handle func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() { defer c.Close(); handle(c) })
		}
	})
	t.Cleanup(func() { l.Close(); conns.Wait() })
	return "http://" + l.Addr().String()
}

// readRequest takes one request off a connection.
func readRequest(c net.Conn) {
	buf := make([]byte, 64<<10)
	_, _ = c.Read(buf)
}

// untilClosed waits for the client to give up.
func untilClosed(c net.Conn) { _, _ = io.Copy(io.Discard, c) }

func TestSendNamesTransportErrors(t *testing.T) {
	t.Parallel()
	refusing, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := "http://" + refusing.Addr().String()
	if err := refusing.Close(); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		url    string
		reason string
		status int
		words  string
	}{
		"a name that does not exist": {"http://no-such-name.invalid/", "dns", 0, "DNS"},
		"refused":                    {refused, "refused", 0, "refused the connection"},
		"closed at once":             {raw(t, func(net.Conn) {}), "closed", 0, "without an answer"},
		"closed without an answer":   {raw(t, readRequest), "closed", 0, "without an answer"},
		"silent":                     {raw(t, func(c net.Conn) { untilClosed(c) }), "header_timeout", 0, "Timed out: connected"},
		"silent after the headers": {raw(t, func(c net.Conn) {
			readRequest(c)
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
			untilClosed(c)
		}), "body_timeout", 200, "did not finish the body"},
		"closed in the body": {raw(t, func(c net.Conn) {
			readRequest(c)
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
		}), "closed", 200, "in the middle"},
		"silent TLS": {strings.Replace(raw(t, untilClosed), "http:", "https:", 1), "connect_timeout", 0, "Timed out: no connection"},
		"not HTTP": {raw(t, func(c net.Conn) {
			readRequest(c)
			fmt.Fprint(c, "220 mail.example ESMTP \x00\xff\r\n")
		}), "network", 0, "failed"},
		"endless headers": {raw(t, func(c net.Conn) {
			readRequest(c)
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\n")
			for {
				if _, err := fmt.Fprintf(c, "X-A: %s\r\n", strings.Repeat("a", 1000)); err != nil {
					return
				}
			}
		}), "network", 0, "failed"},
		"plain HTTP where TLS is expected": {strings.Replace(receiver(t, func(http.ResponseWriter, *http.Request) {}), "http:", "https:", 1), "tls", 0, "does not speak TLS"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := send(t, map[string]any{"url": tt.url, "connect_timeout": 500, "receive_timeout": 500})
			if got.Kind != channel.Retry || got.Reason != tt.reason || got.StatusCode != tt.status || !strings.Contains(got.Error, tt.words) ||
				!utf8.ValidString(got.Error) || strings.ContainsAny(got.Error, "\x00\r\n") {
				t.Errorf("got %+v, want a retry with reason %s, status %d and the words %q", got, tt.reason, tt.status, tt.words)
			}
		})
	}
}

func TestSendNamesTLSErrors(t *testing.T) {
	t.Parallel()
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	t.Cleanup(server.Close)

	t.Run("unknown authority", func(t *testing.T) {
		t.Parallel()
		if got := send(t, map[string]any{"url": server.URL}); got.Kind != channel.Retry || got.Reason != "tls" || !strings.Contains(got.Error, "unknown authority") {
			t.Errorf("got %+v", got)
		}
	})
	trusting := func(t *testing.T, change func(*tls.Config)) *Adapter {
		a := newAdapter(t, channel.GuardOptions{AllowPrivate: true})
		trusted := server.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
		change(trusted)
		a.client.Transport.(*http.Transport).TLSClientConfig = trusted
		return a
	}
	t.Run("expired", func(t *testing.T) {
		t.Parallel()
		a := trusting(t, func(c *tls.Config) { c.Time = func() time.Time { return time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC) } })
		if got := a.Send(t.Context(), outboundChannel(t, map[string]any{"url": server.URL}), outbound()); got.Reason != "tls" || !strings.Contains(got.Error, "expired") {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("another name", func(t *testing.T) {
		t.Parallel()
		a := trusting(t, func(*tls.Config) {})
		url := strings.Replace(server.URL, "127.0.0.1", "localhost", 1)
		if got := a.Send(t.Context(), outboundChannel(t, map[string]any{"url": url}), outbound()); got.Reason != "tls" || !strings.Contains(got.Error, "another name") {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("good", func(t *testing.T) {
		t.Parallel()
		a := trusting(t, func(*tls.Config) {})
		if got := a.Send(t.Context(), outboundChannel(t, map[string]any{"url": server.URL}), outbound()); got.Kind != channel.Sent {
			t.Errorf("got %+v", got)
		}
	})
}

func TestSendBlockedTarget(t *testing.T) {
	t.Parallel()
	var hits atomic.Int64
	url := receiver(t, func(http.ResponseWriter, *http.Request) { hits.Add(1) })
	for _, url := range []string{url, strings.Replace(url, "127.0.0.1", "localhost", 1)} {
		got := newAdapter(t, channel.GuardOptions{}).Send(t.Context(), outboundChannel(t, map[string]any{"url": url}), outbound())
		if got.Kind != channel.Failed || got.Reason != channel.ReasonBlockedTarget || hits.Load() != 0 {
			t.Errorf("%s: got %+v, %d requests", url, got, hits.Load())
		}
	}
}

func TestSendBoundsTheAnswer(t *testing.T) {
	t.Parallel()
	var written atomic.Int64
	done := make(chan struct{})
	url := receiver(t, func(w http.ResponseWriter, r *http.Request) {
		defer close(done)
		chunk := bytes.Repeat([]byte("\xff\x00\x1b<é>"), 10_000)
		for r.Context().Err() == nil && written.Load() < 64<<20 {
			n, err := w.Write(chunk)
			written.Add(int64(n))
			if err != nil {
				return
			}
		}
	})
	got := send(t, map[string]any{"url": url, "max_response_bytes": 100_000})
	<-done
	if got.Kind != channel.Sent || got.StatusCode != http.StatusOK {
		t.Errorf("got %+v, want sent: the status said so", got)
	}
	if n := written.Load(); n >= 64<<20 {
		t.Errorf("all %d bytes were taken", n)
	}
	if len(got.Response) > 2048 || len(got.Response) < 1000 || !utf8.ValidString(got.Response) || strings.ContainsAny(got.Response, "\x00\x1b") {
		t.Errorf("response of %d bytes: %q", len(got.Response), got.Response)
	}
}

func TestSendEnds(t *testing.T) {
	t.Parallel()
	url := raw(t, untilClosed)
	t.Run("with the attempt's deadline", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		got := newAdapter(t, channel.GuardOptions{AllowPrivate: true}).Send(ctx, outboundChannel(t, map[string]any{"url": url}), outbound())
		if got.Kind != channel.Retry || got.Reason != channel.ReasonHeaderTimeout {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("when it is interrupted", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(50*time.Millisecond, cancel)
		got := newAdapter(t, channel.GuardOptions{AllowPrivate: true}).Send(ctx, outboundChannel(t, map[string]any{"url": url}), outbound())
		if got.Kind != channel.Retry || got.Reason != channel.ReasonInterrupted {
			t.Errorf("got %+v", got)
		}
	})
}

// An attempt is one request, however many kept connections the receiver closes under it: what it may have read is not sent
// again behind the back of the attempts that are counted.
func TestSendPostsOnce(t *testing.T) {
	t.Parallel()
	var posts atomic.Int64
	var closing atomic.Bool
	together := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !closing.Load() {
			<-together // so that each request gets a connection of its own, to be kept
			return
		}
		posts.Add(1)
		_, _ = io.Copy(io.Discard, r.Body)
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_ = conn.Close()
	}))
	t.Cleanup(server.Close)
	a, ch := newAdapter(t, channel.GuardOptions{AllowPrivate: true}), outboundChannel(t, map[string]any{"url": server.URL})
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if got := a.Send(t.Context(), ch, outbound()); got.Kind != channel.Sent {
				t.Errorf("warming up: %+v", got)
			}
		})
	}
	close(together)
	wg.Wait()
	closing.Store(true)
	if got := a.Send(t.Context(), ch, outbound()); got.Kind != channel.Retry || got.Reason != channel.ReasonClosed || posts.Load() != 1 {
		t.Errorf("%d posts in one attempt: %+v", posts.Load(), got)
	}
}

func TestSendKeepsConnections(t *testing.T) {
	t.Parallel()
	var opened atomic.Int64
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, strings.Repeat("x", 10_000)) // more than the excerpt
	}))
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			opened.Add(1)
		}
	}
	server.Start()
	t.Cleanup(server.Close)
	a, ch := newAdapter(t, channel.GuardOptions{AllowPrivate: true}), outboundChannel(t, map[string]any{"url": server.URL})
	const workers = 100
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range 10 {
				if got := a.Send(t.Context(), ch, outbound()); got.Kind != channel.Sent {
					t.Errorf("got %+v", got)
				}
			}
		})
	}
	wg.Wait()
	// A few more than workers: two can find no idle one at the same moment.
	if n := opened.Load(); n > 2*workers {
		t.Errorf("%d connections for %d requests of %d workers", n, workers*10, workers)
	}
}

func TestSendWithoutAddress(t *testing.T) {
	t.Parallel()
	for _, config := range []map[string]any{{}, {"url": "http://[::1"}} {
		if got := send(t, config); got.Kind != channel.Failed || got.Reason != channel.ReasonBadConfig {
			t.Errorf("%v: got %+v", config, got)
		}
	}
}

func BenchmarkSend(b *testing.B) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }))
	b.Cleanup(server.Close)
	a, ch, out := newAdapter(b, channel.GuardOptions{AllowPrivate: true}), outboundChannel(b, map[string]any{"url": server.URL}), outbound()
	b.ReportAllocs()
	b.SetParallelism(64)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if got := a.Send(context.Background(), ch, out); got.Kind != channel.Sent {
				b.Errorf("%+v", got)
				return
			}
		}
	})
}
