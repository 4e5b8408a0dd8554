package devpg

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// sharedHome is where root's data go when neither a namespace nor the folder itself can be used.
const sharedHome = "/var/lib/converger-dev"

// identity is the user as which the processes of a server run.
type identity struct {
	name      string // for messages
	uid, gid  int    // as the process sees them; -1 for ourselves
	namespace bool   // in a user namespace, so on the machine still ourselves
}

// attr is the process attributes that make it so.
func (id identity) attr() (*syscall.SysProcAttr, error) {
	// A group of its own keeps a terminal's Ctrl-C from the server: the starter stops it in its own time.
	a := &syscall.SysProcAttr{Setpgid: true}
	switch {
	case id.namespace:
		if err := inNamespace(a, id.uid, id.gid); err != nil {
			return nil, err
		}
	case id.uid >= 0:
		a.Credential = &syscall.Credential{Uid: uint32(id.uid), Gid: uint32(id.gid)}
	}
	return a, nil
}

// own gives path to the user, where that is someone else than ourselves.
func (id identity) own(path string) error {
	if id.namespace || id.uid < 0 {
		return nil
	}
	return os.Chown(path, id.uid, id.gid)
}

// prepare makes the folder of one major version, and shows that the user can enter it and run the program there.
func (id identity) prepare(ctx context.Context, bin Binaries, dir string) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	for _, d := range []string{dir, filepath.Join(dir, "run")} {
		if err := os.Mkdir(d, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		if err := id.own(d); err != nil {
			return err
		}
	}
	a, err := id.attr()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(bin.Dir, "postgres"), "--version")
	cmd.Dir, cmd.SysProcAttr = dir, a
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("run in %s as %s: %w", dir, id.name, err)
	}
	return nil
}

// settle chooses the identity, and the folder below which pgNN lies, and prepares both. home is the configured folder.
func settle(ctx context.Context, bin Binaries, home string) (identity, string, error) {
	pg := "pg" + strconv.Itoa(bin.Major)
	if os.Geteuid() != 0 {
		id := identity{name: "this user", uid: -1, gid: -1}
		dir := filepath.Join(home, pg)
		if uid, ok := owner(filepath.Join(dir, "data")); ok && uid != os.Geteuid() {
			return id, "", fmt.Errorf("devpg: the data in %s belong to user %s: start as that user, or delete the folder to "+
				"start anew", dir, userName(uid))
		}
		if err := id.prepare(ctx, bin, dir); err != nil {
			return id, "", fmt.Errorf("devpg: %w", err)
		}
		return id, dir, nil
	}
	return settleAs(ctx, append(namespaceTries(), dropTries()...), bin, pg, home, fallbackHome(home))
}

// namespaceTries is the way of root that needs no other user's rights; either name will do, Postgres only wants its user
// to have one.
func namespaceTries() []identity {
	for _, name := range []string{"nobody", "postgres"} {
		if id, err := lookup(name); err == nil {
			id.namespace, id.name = true, "root in a user namespace"
			return []identity{id}
		}
	}
	return nil
}

// dropTries are the users that root may become.
func dropTries() (ids []identity) {
	for _, name := range []string{"postgres", "nobody"} {
		if id, err := lookup(name); err == nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// settleAs is settle for root, by the first of the tries that works, at home or else in fallback. Data that exist are used
// as the user that owns them.
func settleAs(ctx context.Context, tries []identity, bin Binaries, pg, home, fallback string) (identity, string, error) {
	var failed []error
	for _, h := range []string{home, fallback} {
		dir := filepath.Join(h, pg)
		uid, exists := owner(filepath.Join(dir, "data"))
		ids := tries
		switch {
		case exists && uid == 0:
			ids = namespaceTries()
		case exists:
			ids = []identity{{name: "user " + userName(uid), uid: uid, gid: primaryGroup(uid)}}
		}
		for _, id := range ids {
			if h == fallback && id.namespace && !exists {
				continue // what failed at home fails there
			}
			err := id.prepare(ctx, bin, dir)
			if err == nil {
				return id, dir, nil
			}
			if ctx.Err() != nil {
				return id, "", fmt.Errorf("devpg: %w", err) // it shows nothing about the folder
			}
			if !exists {
				forget(dir)
			}
			failed = append(failed, err)
		}
		if exists {
			break // never start anew elsewhere beside data that are here
		}
	}
	return identity{}, "", fmt.Errorf("devpg: Postgres does not run as root, and no other way works here; start as an "+
		"ordinary user, or allow user namespaces, or make a user named postgres: %w", errors.Join(failed...))
}

// forget removes the empty folders that a try made, so that they stand in nobody's way as that user's.
func forget(dir string) {
	for _, d := range []string{filepath.Join(dir, "run"), dir} {
		if os.Remove(d) != nil { // not empty: somebody's
			return
		}
	}
	if home := filepath.Dir(dir); filepath.Dir(home) == sharedHome {
		_ = os.Remove(home)
		_ = os.Remove(sharedHome) // while other homes are there it stays
	}
}

// fallbackHome is one folder per home, the same at every start.
func fallbackHome(home string) string {
	sum := sha256.Sum256([]byte(home))
	return filepath.Join(sharedHome, hex.EncodeToString(sum[:6]))
}

func lookup(name string) (identity, error) {
	u, err := user.Lookup(name)
	if err != nil {
		return identity{}, err
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return identity{}, err
	}
	gid, err := strconv.Atoi(u.Gid)
	if err != nil {
		return identity{}, err
	}
	return identity{name: "user " + name, uid: uid, gid: gid}, nil
}

func userName(uid int) string {
	if u, err := user.LookupId(strconv.Itoa(uid)); err == nil {
		return u.Username
	}
	return strconv.Itoa(uid)
}

func primaryGroup(uid int) int {
	if u, err := user.LookupId(strconv.Itoa(uid)); err == nil {
		if gid, err := strconv.Atoi(u.Gid); err == nil {
			return gid
		}
	}
	return uid
}

// owner is the user that owns path, if it exists.
func owner(path string) (uid int, ok bool) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, false
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return int(sys.Uid), true
}
