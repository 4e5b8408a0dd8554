package main

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/secrets"
)

// adminCmd works straight on the database: it makes the first administrator of an installation, and lets one in again who
// is locked out. It knows no key of the installation and needs none.
type adminCmd struct {
	Create      adminCreateCmd      `cmd:"" help:"Make an administrator, with a first password that is printed once."`
	List        adminListCmd        `cmd:"" help:"List the administrators."`
	SignInLink  adminSignInLinkCmd  `cmd:"" name:"sign-in-link" help:"Print a link that signs an administrator in, once and within 15 minutes, also while the account is locked."`
	SetPassword adminSetPasswordCmd `cmd:"" name:"set-password" help:"Give an administrator a new password, printed once; all sessions end."`
	Disable     adminDisableCmd     `cmd:"" help:"Switch an administrator off; all sessions end at once."`
	Enable      adminEnableCmd      `cmd:"" help:"Switch an administrator on again."`
}

// adminFlags are those of all of them.
type adminFlags struct {
	databaseFlag
}

// with calls fn with the users in the database.
func (f adminFlags) with(e *env, fn func(*auth.Users) error) error {
	pool, err := f.open(e)
	if err != nil {
		return err
	}
	defer pool.Close()
	var cfg Config
	if err := readSetting(&cfg, e.getenv, "BCRYPT_COST"); err != nil {
		return err
	}
	passwords, err := auth.NewPasswords(cfg.BcryptCost)
	if err != nil {
		return err
	}
	return fn(auth.NewUsers(pool, passwords))
}

// find calls fn with the administrator of an address.
func (f adminFlags) find(e *env, email string, fn func(*auth.Users, auth.User) error) error {
	return f.with(e, func(users *auth.Users) error {
		u, err := users.ByEmail(e.ctx, auth.Admins, email)
		switch {
		case errors.Is(err, auth.ErrUserNotFound):
			return fmt.Errorf("%s: %w; `server admin list` shows all", email, err)
		case err != nil:
			return err
		}
		return fn(users, u)
	})
}

// newPassword makes a password to be changed at the first sign-in: 130 random bits.
func newPassword() secrets.Text { return secrets.Text(rand.Text()) }

type adminCreateCmd struct {
	adminFlags
	Email string `arg:"" help:"Address, by which the administrator signs in."`
	Name  string `help:"Name, for people."`
	Role  string `help:"What the administrator may do: super_admin everything, admin all but manage administrators, viewer only look." enum:"super_admin,admin,viewer" default:"super_admin"`
}

func (c adminCreateCmd) Run(e *env) error {
	return c.with(e, func(users *auth.Users) error {
		password := newPassword()
		u, err := users.Create(e.ctx, byCommandLine(), auth.Admins, auth.NewUser{
			Email: c.Email, Name: c.Name, Role: auth.Role(c.Role), Password: password, MustChangePassword: true})
		if err != nil {
			return err
		}
		fmt.Fprintf(e.stderr, "Administrator %s (%s). The first password, shown this once:\n", u.Email, u.Role)
		fmt.Fprintln(e.stdout, password.Reveal())
		return nil
	})
}

type adminListCmd struct {
	adminFlags
}

func (c adminListCmd) Run(e *env) error {
	return c.with(e, func(users *auth.Users) error {
		const page = 100
		w := tabwriter.NewWriter(e.stdout, 0, 4, 2, ' ', 0)
		fmt.Fprintln(w, "ADDRESS\tNAME\tROLE\tSTATUS\tLAST SIGN-IN\tID")
		after := uuid.Nil
		for {
			list, err := users.List(e.ctx, auth.Admins, after, page)
			if err != nil {
				return err
			}
			for _, u := range list {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", u.Email, u.Name, u.Role, u.Status, when(u.LastSignInAt), u.ID)
				after = u.ID
			}
			if len(list) < page {
				break
			}
		}
		if after == uuid.Nil {
			fmt.Fprintln(e.stdout, "No administrators yet. Make one: server admin create ADDRESS")
			return nil
		}
		return w.Flush()
	})
}

type adminSignInLinkCmd struct {
	adminFlags
	Email     string `arg:"" help:"Address of the administrator."`
	PublicURL string `help:"Where browsers reach the hub; default is the environment's PUBLIC_URL." placeholder:"https://…"`
}

func (c adminSignInLinkCmd) Run(e *env) error {
	base, err := c.base(e)
	if err != nil {
		return err
	}
	return c.find(e, c.Email, func(users *auth.Users, u auth.User) error {
		token, expires, err := users.IssueLink(e.ctx, byCommandLine(), u.Realm, u.ID)
		if err != nil {
			return err
		}
		fmt.Fprintf(e.stderr, "Signs in as %s, once, until %s:\n", u.Email, expires.UTC().Format("15:04:05 MST"))
		fmt.Fprintln(e.stdout, base+"/admin/link/"+token.Reveal())
		return nil
	})
}

// base is where browsers reach the hub, by the rules of PUBLIC_URL.
func (c adminSignInLinkCmd) base(e *env) (string, error) {
	value := cmp.Or(c.PublicURL, strings.TrimSpace(e.getenv("PUBLIC_URL")))
	if value == "" {
		return "", misused("at which address do browsers reach the hub? Set PUBLIC_URL, or pass --public-url https://…")
	}
	base, err := parsePublicURL(value)
	if err != nil {
		return "", misused(fmt.Sprintf("the address %q of the hub %v", value, err))
	}
	return base, nil
}

type adminSetPasswordCmd struct {
	adminFlags
	Email string `arg:"" help:"Address of the administrator."`
}

func (c adminSetPasswordCmd) Run(e *env) error {
	return c.find(e, c.Email, func(users *auth.Users, u auth.User) error {
		password := newPassword()
		if err := users.SetPassword(e.ctx, byCommandLine(), u.Realm, u.ID, password, true); err != nil {
			return err
		}
		fmt.Fprintf(e.stderr, "The new password of %s, to be changed at the next sign-in, shown this once:\n", u.Email)
		fmt.Fprintln(e.stdout, password.Reveal())
		return nil
	})
}

type adminDisableCmd struct {
	adminFlags
	Email string `arg:"" help:"Address of the administrator."`
}

func (c adminDisableCmd) Run(e *env) error {
	return c.set(e, c.Email, auth.UserInactive)
}

type adminEnableCmd struct {
	adminFlags
	Email string `arg:"" help:"Address of the administrator."`
}

func (c adminEnableCmd) Run(e *env) error {
	return c.set(e, c.Email, auth.UserActive)
}

func (f adminFlags) set(e *env, email string, status auth.UserStatus) error {
	return f.find(e, email, func(users *auth.Users, u auth.User) error {
		u, err := users.Update(e.ctx, byCommandLine(), u.Realm, u.ID, auth.UserChange{Status: &status})
		if err != nil {
			return err
		}
		fmt.Fprintf(e.stdout, "%s is %s.\n", u.Email, u.Status)
		return nil
	})
}
