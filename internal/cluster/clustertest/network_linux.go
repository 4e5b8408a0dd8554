package clustertest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Network is machines, as network namespaces, on a switch at which the test has an address too: it reaches every one, whatever
// they can't say to each other. Machines are numbered from 0.
type Network struct {
	name, net string // the start of all names, and the first three bytes of addresses
}

// NewNetwork makes n machines and unmakes them when the test ends. It skips the test where that takes rights or programs
// that are not there.
func NewNetwork(t testing.TB, n int) *Network {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("network namespaces need the program ip:", err)
	}
	var w *Network
	for attempt := 0; ; attempt++ { // another test may have the number
		id := rand.IntN(235) + 20
		w = &Network{fmt.Sprintf("cvg%d", id), fmt.Sprintf("10.99.%d", id)}
		out, err := exec.Command("ip", "link", "add", w.name, "type", "bridge").CombinedOutput() //nolint:noctx // at once
		if err == nil {
			break
		}
		if attempt == 10 || !strings.Contains(string(out), "exists") {
			t.Skipf("this system makes no bridges: %v: %s", err, out)
		}
	}
	t.Cleanup(func() { w.ip(t, "link", "del", w.name) })
	w.ip(t, "link", "set", w.name, "up")
	w.ip(t, "addr", "add", w.Host()+"/24", "dev", w.name)
	for i := range n {
		space := w.Space(i)
		w.ip(t, "netns", "add", space)
		t.Cleanup(func() { w.ip(t, "netns", "del", space) })
		w.ip(t, "link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
		w.ip(t, "link", "set", space, "master", w.name, "up")
		w.ip(t, "-n", space, "addr", "add", w.Addr(i)+"/24", "dev", "eth0")
		w.ip(t, "-n", space, "link", "set", "eth0", "up")
		w.ip(t, "-n", space, "link", "set", "lo", "up")
	}
	return w
}

// Resolver makes every machine ask the test's own address for names; it skips the test where that can't be.
func (w *Network) Resolver(t testing.TB, machines int) {
	t.Helper()
	for i := range machines {
		etc := filepath.Join("/etc/netns", w.Space(i)) // ip netns exec puts these files in place of those of /etc
		if err := os.MkdirAll(etc, 0o755); err != nil {
			t.Skip("a namespace needs a resolv.conf of its own:", err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(etc); _ = os.Remove(filepath.Dir(etc)) }) // the folder goes with the last
		if err := os.WriteFile(filepath.Join(etc, "resolv.conf"), []byte("nameserver "+w.Host()+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// Space names machine i's namespace.
func (w *Network) Space(i int) string { return fmt.Sprintf("%s-%d", w.name, i) }

// Host is the test's own address at the switch.
func (w *Network) Host() string { return w.net + ".254" }

// Addr is machine i's address.
func (w *Network) Addr(i int) string { return fmt.Sprintf("%s.%d", w.net, i+1) }

// Exec is what a command has in front of it to run on machine i.
func (w *Network) Exec(i int) []string { return []string{"ip", "netns", "exec", w.Space(i)} }

func (w *Network) ip(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil { //nolint:noctx // at once
		t.Errorf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// Unplug takes machine i's cable out; Plug puts it back.
func (w *Network) Unplug(t testing.TB, i int) { t.Helper(); w.ip(t, "link", "set", w.Space(i), "down") }

// Plug is after Unplug.
func (w *Network) Plug(t testing.TB, i int) { t.Helper(); w.ip(t, "link", "set", w.Space(i), "up") }

// Mute loses what machine i sends to machine j, and that only: frames go to an address of the switch that nobody has.
func (w *Network) Mute(t testing.TB, i, j int) {
	t.Helper()
	w.ip(t, "-n", w.Space(i), "neigh", "replace", w.Addr(j), "lladdr", "02:00:00:00:be:ef", "dev", "eth0", "nud", "permanent")
}

// Unmute is after Mute.
func (w *Network) Unmute(t testing.TB, i, j int) {
	t.Helper()
	w.ip(t, "-n", w.Space(i), "neigh", "del", w.Addr(j), "dev", "eth0")
}
