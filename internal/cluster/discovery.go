package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"
)

const (
	lookupTimeout = 2 * time.Second
	// joinEvery is the pace of the standing job: a healed split is found within one pace and one connection attempt.
	joinEvery = time.Second
	// lookupEvery is the pace of lookups while everybody who is listed is a member; else each joinEvery brings one.
	lookupEvery = 5 * time.Second
	// rejoinGap spares an address that answered under another: it is joined and still looks absent.
	rejoinGap = 3 * time.Second
)

// finder finds addresses of members. Not safe for concurrent use.
type finder struct {
	resolver Resolver
	query    string   // "" or host:port
	peers    []string // host:port
	log      *slog.Logger

	last   map[string][]netip.AddrPort // the last good answers
	failed bool
}

// parseEndpoint splits host:port.
func parseEndpoint(s string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(s)
	if err != nil {
		return "", 0, fmt.Errorf("%q is no host:port", s)
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("%q has no port from 0 to 65535", s)
	}
	return host, int(n), nil
}

func hasPort(s string) bool {
	_, _, err := net.SplitHostPort(s)
	return err == nil
}

// find looks everything up. Of a name that fails, or whose answer is empty, the last good answer stands; known is false if
// there never was one at all.
func (f *finder) find(ctx context.Context) (list []netip.AddrPort, known bool) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	if f.last == nil {
		f.last = map[string][]netip.AddrPort{}
	}
	endpoints := f.peers
	if f.query != "" {
		endpoints = []string{f.query}
	}
	var problems []error
	for _, e := range endpoints {
		addrs, err := f.resolve(ctx, e)
		switch {
		case err != nil:
			problems = append(problems, err)
		case len(addrs) == 0:
			problems = append(problems, fmt.Errorf("%s has no addresses", e))
		default:
			f.last[e] = addrs
		}
		list = append(list, f.last[e]...)
	}
	slices.SortFunc(list, netip.AddrPort.Compare)
	list = slices.Compact(list)
	if failed := len(problems) > 0; failed != f.failed {
		f.failed = failed
		if failed {
			f.log.Warn("peers can't be looked up; the last good answer stands", slog.Bool("outage", true), slog.Any("error", errors.Join(problems...)), slog.Any("last", list))
		} else {
			f.log.Warn("peers are looked up again", slog.Bool("outage", false), slog.Any("found", list))
		}
	}
	return list, len(list) > 0
}

func (f *finder) resolve(ctx context.Context, endpoint string) ([]netip.AddrPort, error) {
	host, port, err := parseEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	if a, err := netip.ParseAddr(host); err == nil {
		return []netip.AddrPort{netip.AddrPortFrom(a.Unmap(), uint16(port))}, nil
	}
	addrs, err := f.resolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	out := make([]netip.AddrPort, len(addrs))
	for i, a := range addrs {
		out[i] = netip.AddrPortFrom(a.Unmap(), uint16(port))
	}
	return out, nil
}

// joiner is the standing job that keeps the cluster whole: gossip alone never heals a split in which both sides have
// declared each other dead.
type joiner struct {
	n      *Node
	gossip *gossip
	next   map[netip.AddrPort]time.Time
	done   chan attempt
	flying int
	// attempts may outlast run by a time-out: who leaves does not wait for those that don't answer.
	attempts sync.WaitGroup
}

type attempt struct {
	to  netip.AddrPort
	err error
}

// run joins whoever is listed and not a member, again and again. The first round's end is told to the node.
func (j *joiner) run(ctx context.Context) {
	j.next, j.done = map[netip.AddrPort]time.Time{}, make(chan attempt)
	var list []netip.AddrPort
	var known bool
	var looked time.Time
	tick := time.NewTicker(joinEvery)
	defer tick.Stop()
	first := true
	for {
		missing := j.missing(list)
		if len(missing) > 0 || len(list) == 0 || time.Since(looked) >= lookupEvery {
			list, known = j.n.finder.find(ctx)
			looked = time.Now()
			missing = j.missing(list)
		}
		j.n.expect(len(j.others(list)), known)
		j.attempt(ctx, missing)
		for first && j.flying > 0 {
			select {
			case a := <-j.done:
				j.ended(a)
			case <-ctx.Done():
				return
			}
		}
		if first {
			first = false
			close(j.n.firstRound)
		}
		for waiting := true; waiting; {
			select {
			case <-tick.C:
				waiting = false
			case a := <-j.done:
				j.ended(a)
			case <-ctx.Done():
				return
			}
		}
	}
}

// others are the listed addresses that are not this node's.
func (j *joiner) others(list []netip.AddrPort) []netip.AddrPort {
	return slices.DeleteFunc(slices.Clone(list), j.n.isOwn)
}

func (j *joiner) missing(list []netip.AddrPort) []netip.AddrPort {
	members := j.n.news.addresses()
	return slices.DeleteFunc(j.others(list), func(a netip.AddrPort) bool { return slices.Contains(members, a) })
}

func (j *joiner) attempt(ctx context.Context, missing []netip.AddrPort) {
	now := time.Now()
	for _, a := range missing {
		if now.Before(j.next[a]) {
			continue
		}
		j.next[a] = now.Add(time.Hour) // until it has ended
		j.flying++
		j.attempts.Go(func() {
			err := j.gossip.join(a)
			select {
			case j.done <- attempt{a, err}:
			case <-ctx.Done():
			}
		})
	}
	for a := range j.next { // addresses come and go
		if !slices.Contains(missing, a) && now.After(j.next[a]) {
			delete(j.next, a)
		}
	}
}

func (j *joiner) ended(a attempt) {
	j.flying--
	j.n.metrics.join(a.err == nil)
	if a.err != nil {
		j.next[a.to] = time.Time{}
		j.n.log.Debug("a listed peer does not answer", slog.Any("address", a.to), slog.Any("error", a.err))
		return
	}
	j.next[a.to] = time.Now().Add(rejoinGap)
}
