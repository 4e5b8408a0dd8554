package webhook

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"converger/internal/channel"
	"converger/internal/channel/payload"
	"converger/internal/signature"
)

// Headers of a request, beside those of package signature.
const (
	headerEvent      = "X-Converger-Event"
	headerDeliveryID = "X-Converger-Delivery-Id"

	eventActivityCreated = "activity.created"
	userAgent            = "Converger"
)

// maxExcerpt is how much of an answer is kept, in bytes.
const maxExcerpt = 2 << 10

// Send posts the activity once, signed over this attempt's time. The delivery's id is the same for all attempts, so that
// a receiver can drop repeats: even an attempt of which nothing is known but that it was sent may be repeated.
func (a *Adapter) Send(ctx context.Context, ch *channel.Channel, out channel.Outbound) channel.Outcome {
	c, err := parseConfig(ch.Config)
	if err != nil || c.URL == "" {
		return channel.Outcome{Kind: channel.Failed, Reason: channel.ReasonBadConfig, Error: "The channel has no address to post to; set url in its config."}
	}
	ctx, watch := startWatch(ctx, c)
	defer watch.stop()
	req, err := request(ctx, c, ch, out)
	if err != nil {
		return channel.Outcome{Kind: channel.Failed, Reason: channel.ReasonBadConfig, Error: "The channel's config does not make a request: " + err.Error() + "."}
	}

	resp, err := a.client.Do(req)
	if err != nil {
		return watch.failure(err, req.URL.Host, false)
	}
	defer resp.Body.Close()
	excerpt, bodyErr := readAnswer(resp.Body, c.MaxResponseBytes)

	outcome := byStatus(resp, out.Now)
	if outcome.Kind == channel.Sent && bodyErr != nil {
		outcome = watch.failure(bodyErr, req.URL.Host, true)
	}
	outcome.StatusCode = resp.StatusCode
	outcome.Response = withoutSecrets(payload.Excerpt(excerpt, maxExcerpt), c)
	return outcome
}

func request(ctx context.Context, c config, ch *channel.Channel, out channel.Outbound) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, c.Method, c.URL, bytes.NewReader(out.Body))
	if err != nil {
		return nil, errors.New("the address cannot be read")
	}
	req.Header.Set("User-Agent", userAgent)
	for name, value := range c.Headers {
		req.Header.Set(name, value)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(headerEvent, eventActivityCreated)
	req.Header.Set(headerDeliveryID, out.DeliveryID.String())
	secrets := ch.Secrets(out.Now)
	if err := signature.SignTimestamped(req.Header, out.Body, secrets, out.Now); err != nil {
		return nil, err
	}
	if err := signature.SignStandard(req.Header, out.DeliveryID.String(), out.Body, standardKeys(secrets), out.Now); err != nil {
		return nil, err
	}
	return req, nil
}

// byStatus is what an answer means.
func byStatus(resp *http.Response, now time.Time) channel.Outcome {
	status := resp.StatusCode
	answer := "HTTP " + strconv.Itoa(status)
	if text := http.StatusText(status); text != "" {
		answer += " " + text
	}
	switch {
	case status >= 200 && status < 300:
		return channel.Outcome{Kind: channel.Sent}
	case status >= 300 && status < 400:
		hint := "Redirects are not followed; set the channel's url to the final address."
		if to, err := resp.Location(); err == nil && to.Host != "" {
			hint = fmt.Sprintf("Redirects are not followed; the answer points to the host %q. Set the channel's url to the final address.",
				payload.Cut(payload.Clean(to.Hostname()), 253))
		}
		return channel.Outcome{Kind: channel.Failed, Reason: channel.ReasonRedirect, Error: answer + ". " + hint}
	case status == http.StatusGone:
		return channel.Outcome{Kind: channel.Failed, Reason: channel.ReasonGone, Disable: true,
			Error: answer + ". The receiver wants no more deliveries."}
	}
	outcome := channel.Outcome{Kind: channel.Failed, Reason: channel.ReasonRejected, Error: "The receiver answered " + answer + "."}
	switch {
	case status == http.StatusTooManyRequests:
		outcome.Kind, outcome.Reason = channel.Retry, channel.ReasonRateLimited
	case status == http.StatusRequestTimeout || status == http.StatusTooEarly:
		outcome.Kind = channel.Retry
	case status >= 500:
		outcome.Kind, outcome.Reason = channel.Retry, channel.ReasonServerError
	}
	if outcome.Kind == channel.Retry {
		outcome.RetryAfter = retryAfter(resp.Header.Get("Retry-After"), now)
	}
	return outcome
}

// retryAfter reads seconds or an HTTP date (RFC 9110 10.2.3). Garbage and the past ask for nothing.
func retryAfter(value string, now time.Time) time.Duration {
	var wait time.Duration
	value = strings.TrimSpace(value)
	switch seconds, err := strconv.ParseUint(value, 10, 64); {
	case err == nil:
		wait = time.Duration(min(seconds, uint64(channel.MaxRetryAfter/time.Second))) * time.Second
	case errors.Is(err, strconv.ErrRange):
		wait = channel.MaxRetryAfter
	default:
		if at, err := http.ParseTime(value); err == nil {
			wait = at.Sub(now)
		}
	}
	return max(0, min(wait, channel.MaxRetryAfter))
}

// readAnswer reads at most most bytes and returns the first of them. It reads on beyond those because a connection whose
// answer was read to its end can be used again.
func readAnswer(body io.Reader, most int64) ([]byte, error) {
	body = io.LimitReader(body, most)
	excerpt, err := io.ReadAll(io.LimitReader(body, maxExcerpt))
	if err == nil {
		_, err = io.Copy(io.Discard, body)
	}
	return excerpt, err
}

// minHidden is the shortest header value, and the shortest beginning of one at the end of an excerpt, that is hidden in
// answers, in bytes: shorter ones would riddle innocent text.
const minHidden = 8

// withoutSecrets hides the channel's own header values in an answer that repeats the request: as they were sent, as JSON
// writes them, without the scheme of an Authorization, and cut off by the excerpt's end.
func withoutSecrets(answer string, c config) string {
	var hidden []string
	for _, value := range c.Headers {
		forms := []string{value}
		if _, credentials, ok := strings.Cut(value, " "); ok {
			forms = append(forms, credentials)
		}
		for _, form := range forms {
			quoted, _ := json.Marshal(form) // strings always marshal
			hidden = append(hidden, form, strings.Trim(string(quoted), `"`))
		}
	}
	hidden = slices.DeleteFunc(hidden, func(s string) bool { return len(s) < minHidden })
	slices.SortFunc(hidden, func(a, b string) int { return cmp.Compare(len(b), len(a)) }) // a value before its parts
	for _, value := range hidden {
		answer = strings.ReplaceAll(answer, value, channel.Redacted)
	}
	for _, value := range hidden {
		for n := len(value) - 1; n >= minHidden; n-- {
			if rest, ok := strings.CutSuffix(answer, value[:n]); ok {
				return payload.Cut(rest, maxExcerpt-len(channel.Redacted)) + channel.Redacted
			}
		}
	}
	return payload.Cut(answer, maxExcerpt)
}

// The causes with which a watch ends an attempt.
var (
	errConnectTimeout = errors.New("time to connect is over")
	errReceiveTimeout = errors.New("time to answer is over")
)

// watch ends an attempt that takes too long: first to connect, then to answer. Time-outs of the client itself would be
// the same for all channels.
type watch struct {
	ctx     context.Context
	cancel  context.CancelCauseFunc
	connect time.Duration
	receive time.Duration

	mu        sync.Mutex
	timer     *time.Timer
	connected bool
}

func startWatch(ctx context.Context, c config) (context.Context, *watch) {
	w := &watch{
		connect: time.Duration(c.ConnectTimeout) * time.Millisecond,
		receive: time.Duration(c.ReceiveTimeout) * time.Millisecond,
	}
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	w.timer = time.AfterFunc(w.connect, func() { w.cancel(errConnectTimeout) })
	return httptrace.WithClientTrace(w.ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { w.gotConn() }}), w
}

// gotConn is called again when a kept connection was closed and the request goes out on another one.
func (w *watch) gotConn() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer.Stop()
	w.connected = true
	w.timer = time.AfterFunc(w.receive, func() { w.cancel(errReceiveTimeout) })
}

func (w *watch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer.Stop()
	w.cancel(nil)
}

// bound says which time was over.
func (w *watch) bound(cause error) string {
	switch {
	case errors.Is(cause, errConnectTimeout):
		return fmt.Sprintf("time to connect: %s", w.connect)
	case errors.Is(cause, errReceiveTimeout):
		return fmt.Sprintf("time to answer: %s", w.receive)
	}
	return "the time of the whole attempt, timeout_ms of the retry policy, was over"
}

// failure is the outcome of a transport error. host is the address without anything secret; answering says that the
// status had already come.
func (w *watch) failure(err error, host string, answering bool) channel.Outcome {
	w.mu.Lock()
	connected := w.connected
	w.mu.Unlock()
	retry := func(reason, format string, args ...any) channel.Outcome {
		return channel.Outcome{Kind: channel.Retry, Reason: reason, Error: fmt.Sprintf(format, args...)}
	}
	var (
		dns   *net.DNSError
		cause = context.Cause(w.ctx)
		ended = errors.Is(cause, errConnectTimeout) || errors.Is(cause, errReceiveTimeout) ||
			errors.Is(cause, context.DeadlineExceeded) || errors.Is(err, syscall.ETIMEDOUT) || isTimeout(err)
	)
	switch {
	case errors.Is(err, channel.ErrBlockedTarget):
		return channel.Outcome{Kind: channel.Failed, Reason: channel.ReasonBlockedTarget,
			Error: fmt.Sprintf("%s leads to an address that is not a public one; an operator can allow it.", host)}
	case !ended && w.ctx.Err() != nil:
		return retry(channel.ReasonInterrupted, "The attempt was interrupted on this side.")
	case errors.As(err, &dns):
		if dns.IsNotFound {
			return retry(channel.ReasonDNS, "DNS: the name of %s does not resolve.", host)
		}
		return retry(channel.ReasonDNS, "DNS: the name of %s could not be looked up.", host)
	case ended && !connected:
		return retry(channel.ReasonConnectTimeout, "Timed out: no connection to %s (%s).", host, w.bound(cause))
	case ended && answering:
		return retry(channel.ReasonBodyTimeout, "Timed out: %s began to answer and did not finish the body (%s).", host, w.bound(cause))
	case ended:
		return retry(channel.ReasonHeaderTimeout, "Timed out: connected to %s and got no answer's headers (%s).", host, w.bound(cause))
	case errors.Is(err, syscall.ECONNREFUSED):
		return retry(channel.ReasonRefused, "%s refused the connection.", host)
	case errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH):
		return retry(channel.ReasonNetwork, "%s cannot be reached from here.", host)
	}
	if words, ok := tlsFailure(err); ok {
		return retry(channel.ReasonTLS, "TLS: %s %s.", host, words)
	}
	if closedByReceiver(err) {
		if answering {
			return retry(channel.ReasonClosed, "%s closed the connection in the middle of its answer.", host)
		}
		return retry(channel.ReasonClosed, "%s closed the connection without an answer.", host)
	}
	// What is left may repeat the answer or, in url.Error, the address with its query.
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	return retry(channel.ReasonNetwork, "The exchange with %s failed: %s.", host, payload.Excerpt([]byte(err.Error()), 300))
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func closedByReceiver(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		// What net/http says when the end came before the request was written; it exports no value for it.
		strings.Contains(err.Error(), "server closed idle connection")
}

// tlsFailure says what went wrong with a secure connection.
func tlsFailure(err error) (string, bool) {
	var (
		invalid   x509.CertificateInvalidError
		authority x509.UnknownAuthorityError
		name      x509.HostnameError
		record    tls.RecordHeaderError
		verify    *tls.CertificateVerificationError
		alert     tls.AlertError
	)
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "has a certificate that is expired or not yet valid", true
	case errors.As(err, &authority):
		return "has a certificate of an unknown authority", true
	case errors.As(err, &name):
		return "has a certificate for another name", true
	case errors.As(err, &invalid), errors.As(err, &verify):
		return "has a certificate that cannot be trusted", true
	case errors.As(err, &record), errors.Is(err, http.ErrSchemeMismatch):
		return "does not speak TLS; is it http://?", true
	case errors.As(err, &alert):
		return "broke off the handshake (" + alert.Error() + ")", true
	}
	return "", false
}
