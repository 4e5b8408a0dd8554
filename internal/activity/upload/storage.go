package upload

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/uuid"
)

var (
	// ErrNoFile says that the storage has nothing under this key.
	ErrNoFile = errors.New("upload: no such file")
	// ErrStorage says that the storage failed: a full disk, a missing folder, a service that does not answer.
	ErrStorage = errors.New("upload: the storage failed")
)

// Storage keeps files under keys of the form of [Key]. Its methods are safe for concurrent use; a key is written once.
type Storage interface {
	// Put stores what r gives under key, durably, and all of it or nothing: whatever error it returns, nothing is there
	// under key afterwards. An error of r is returned as it is or wrapped.
	Put(ctx context.Context, key string, r io.Reader) error
	// Open opens a file for reading. ErrNoFile when there is none.
	Open(ctx context.Context, key string) (io.ReadSeekCloser, error)
	// Delete removes a file; one that is not there is no error.
	Delete(ctx context.Context, key string) error
	// List gives each the keys of the files last written before an instant, in no order, until it returns an error. What
	// an interrupted Put has left behind, if it is as old, is removed on the way.
	List(ctx context.Context, before time.Time, each func(key string) error) error
}

// Key is where the file of an attachment lies: made of ids only, never of anything that its sender wrote.
func Key(tenant, attachment uuid.UUID) string { return tenant.String() + "/" + attachment.String() }

// ParseKey is the inverse of Key.
func ParseKey(key string) (tenant, attachment uuid.UUID, ok bool) {
	t, a, _ := strings.Cut(key, "/")
	tenant, errT := uuid.Parse(t)
	attachment, errA := uuid.Parse(a)
	return tenant, attachment, errT == nil && errA == nil && Key(tenant, attachment) == key
}

// Dir is a folder with a folder for each tenant. Files that are not named by a Key are left alone.
type Dir struct{ path string }

var _ Storage = (*Dir)(nil)

// NewDir makes a Dir. It touches nothing: the folder is made by the first Put or [Dir.Check].
func NewDir(path string) *Dir { return &Dir{path} }

// partSuffix marks a file that is still being written.
const partSuffix = ".part"

func (d *Dir) file(key string) (string, error) {
	if _, _, ok := ParseKey(key); !ok {
		return "", fmt.Errorf("upload: %q is no key", key)
	}
	return filepath.Join(d.path, filepath.FromSlash(key)), nil
}

// Check makes the folder if it has to, and says whether files can be made in it.
func (d *Dir) Check(context.Context) error {
	if err := os.MkdirAll(d.path, 0o700); err != nil {
		return fmt.Errorf("%w: %w", ErrStorage, err)
	}
	f, err := os.CreateTemp(d.path, ".check-*")
	if err != nil {
		return fmt.Errorf("%w: %w", ErrStorage, err)
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// Put implements [Storage]: into a second file in the same folder, which is renamed once its bytes are on the disk.
func (d *Dir) Put(ctx context.Context, key string, r io.Reader) (err error) {
	path, err := d.file(key)
	if err != nil {
		return err
	}
	folder := filepath.Dir(path)
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return err
	}
	part := path + partSuffix
	f, err := os.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			_ = os.Remove(part) // gone already when it was renamed
			_ = os.Remove(path)
		}
	}()
	if _, err := io.Copy(f, contextReader{ctx, r}); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(part, path); err != nil {
		return err
	}
	// Their names are durable only once the folders are.
	return errors.Join(syncFolder(folder), syncFolder(d.path))
}

func syncFolder(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// contextReader ends with its context.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(b []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(b)
}

// Open implements [Storage].
func (d *Dir) Open(_ context.Context, key string) (io.ReadSeekCloser, error) {
	path, err := d.file(key)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, ErrNoFile
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrStorage, err)
	}
	return f, nil
}

// Delete implements [Storage]. The tenant's folder stays.
func (d *Dir) Delete(_ context.Context, key string) error {
	path, err := d.file(key)
	if err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", ErrStorage, err)
	}
	return nil
}

// List implements [Storage].
func (d *Dir) List(ctx context.Context, before time.Time, each func(key string) error) error {
	err := filepath.WalkDir(d.path, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, fs.ErrNotExist): // removed meanwhile, or never made
			return nil
		case err != nil:
			return err
		case !entry.Type().IsRegular():
			return nil
		}
		name, err := filepath.Rel(d.path, path)
		if err != nil {
			return err
		}
		key, part := strings.CutSuffix(filepath.ToSlash(name), partSuffix)
		if _, _, ok := ParseKey(key); !ok {
			return nil
		}
		info, err := entry.Info()
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		case !info.ModTime().Before(before):
			return nil
		case part:
			return os.Remove(path)
		}
		return each(key)
	})
	if err != nil {
		return fmt.Errorf("upload: list files: %w", err)
	}
	return nil
}
