package hub

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
)

var errNoMetrics = errors.New("its /metrics can't be read: pass its METRICS_TOKEN, or let this address in (METRICS_ALLOWED_IPS)")

// Metrics reads a node's /metrics: values by name and labels as they stand there. token is its METRICS_TOKEN; "" tries without.
func (c *Client) Metrics(ctx context.Context, token string) (map[string]float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.Base+"/metrics", http.NoBody)
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		_, _ = io.Copy(io.Discard, resp.Body)
		return nil, fmt.Errorf("%w (HTTP %d)", errNoMetrics, resp.StatusCode)
	}
	return parseMetrics(resp.Body)
}

// parseMetrics reads the text format of Prometheus, without time stamps.
func parseMetrics(in io.Reader) (map[string]float64, error) {
	values := map[string]float64{}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		line := lines.Text()
		if strings.HasPrefix(line, "#") {
			continue
		}
		at := strings.LastIndexByte(line, ' ')
		v, err := strconv.ParseFloat(line[at+1:], 64)
		if at < 0 || err != nil {
			return nil, fmt.Errorf("read /metrics: %q is no series", line)
		}
		values[line[:at]] = v
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read /metrics: %w", err)
	}
	return values, nil
}
